"""Continuous batching: the plan of each step, preemption, and the commit of its results."""
