"""Where the time of requests went, and why, for as long as it is remembered."""
