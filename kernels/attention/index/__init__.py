"""What an indexer chooses: its queries and keys are rotated, each token is scored, and the best are found."""
