"""Anthropic's Messages API: the same chat, in that API's words."""
