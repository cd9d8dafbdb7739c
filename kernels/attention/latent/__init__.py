"""Attention to latents: vectors of which each is the key of all query heads, and its first numbers the value.

What multi-head latent attention (DeepSeek-V2) keeps of a token. A cache of them is
[blocks, 1, 1, block_size, D], of which the first `latent` numbers are the value, and what is behind them is
rotated by position. Tiles come in these two parts, since both are padded to a power of two.
"""
