"""What a model thinks before it answers, told from its answer."""
