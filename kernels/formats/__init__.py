"""The formats in which the cache holds keys and values."""
