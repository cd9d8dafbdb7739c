"""Sequences, their rows and tokens, beams and grammars."""
