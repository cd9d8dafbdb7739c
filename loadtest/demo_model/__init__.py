"""The demo model's training: corpus, tokenizer, evaluation."""
