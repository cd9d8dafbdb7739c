"""HTTP and WebSocket connections: who may ask, with what, and for how long."""
