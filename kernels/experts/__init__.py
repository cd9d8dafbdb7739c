"""A layer of experts: which ones a token goes to, and their products."""
