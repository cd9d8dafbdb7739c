"""The API process: HTTP, SSE, tokenisation, the pages and the command line."""
