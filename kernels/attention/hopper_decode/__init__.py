"""Decode attention for Hopper, in Gluon."""
