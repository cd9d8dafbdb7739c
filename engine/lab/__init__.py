"""A pool of KV blocks to play with: the block manager that serves, without a model."""
