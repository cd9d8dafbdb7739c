"""One model over several ranks: processes that compute its parts together, led by rank 0."""
