"""Quire's scheduler and block manager on a virtual clock, and the memory managers that the paper compares."""
