"""Products by weights that stay in few bits, as the files of a folder have them."""
