"""Load tests and measurements of the server and its kernels."""
