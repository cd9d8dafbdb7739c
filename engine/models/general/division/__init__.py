"""A model by transformers' code divided among ranks, by transformers' plan of tensor parallelism."""
