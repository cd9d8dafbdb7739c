"""Two replicas, a Redis and a router on loopback."""
