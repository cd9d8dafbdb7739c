"""Vectors of texts instead of answers: embeddings, and scores of pairs."""
