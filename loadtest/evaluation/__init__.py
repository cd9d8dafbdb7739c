"""The PagedAttention paper's figures (Kwon et al., SOSP 2023), one module each, by the simulator."""
