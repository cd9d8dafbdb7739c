"""KV blocks of both tiers: pool, tables, prefix cache and host tier."""
