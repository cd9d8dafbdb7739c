"""Prefill attention for Hopper, in Gluon."""
