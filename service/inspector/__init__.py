"""The memory as pages show it: the pools that visitors play with, and the engine's own."""
