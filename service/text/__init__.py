"""Tokens to text and back: tokenizer, templates, tools, grammars."""
