"""`quire bench`: offline throughput, rooflines and profiles."""
