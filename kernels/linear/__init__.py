"""Linear layers, by the number of tokens and by GPU."""
