"""The registry of findable blocks in Redis, for routers and other replicas."""
