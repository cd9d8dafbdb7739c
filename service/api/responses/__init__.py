"""The Responses API, over HTTP and over WebSocket."""
