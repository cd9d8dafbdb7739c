"""Models that run by transformers' own modelling code, over the paged cache."""
