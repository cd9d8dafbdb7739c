"""Continuous batching: what runs, what waits, who is preempted, and what a step brought."""
