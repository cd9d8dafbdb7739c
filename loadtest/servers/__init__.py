"""Processes that are measured or stand in for others: servers, a Redis, an engine without a model."""
