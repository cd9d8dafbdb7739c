"""What an indexer chooses: its queries and keys are rotated, and each token is scored."""
