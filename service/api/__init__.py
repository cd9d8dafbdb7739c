"""The endpoints, each with what its clients may send."""
