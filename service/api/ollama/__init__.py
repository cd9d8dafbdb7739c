"""Ollama's API: the same chat and completions, in that API's words."""
