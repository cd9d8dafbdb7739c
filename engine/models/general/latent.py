"""Multi-head latent attention over a cache of latents (DeepSeek-V2; Kimi, GLM, MiniCPM3 and others have it).

Transformers' modules expand a token's latent to keys and values of each head. Here it is kept as it is, one
vector for all heads. To attend to it so, the matrix that expands it goes to the queries instead, and to what
they attended to: (W_k c) · q = c · (W_kᵀ q), and a sum of W_v c is W_v of the sum of c.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.models.general.unsupported import UnsupportedAttention
from quire.kernels.attention.latent.expansion import Expansion

MOST_LATENT = 512  # numbers of a value, which the kernels take, and of what is behind it
MOST_REST = 128
_TOLERANCE = 1e-4  # of a product of noise in fp32


@dataclass(frozen=True, slots=True)
class Sizes:
    """latent and rotated: numbers kept of a token. plain, rotated: of a head's key; value: of its value."""

    latent: int
    rotated: int
    plain: int
    value: int

    @property
    def head_dim(self) -> int:
        """Return how many numbers a head's key or value has, whichever has more."""
        return max(self.plain + self.rotated, self.value)


class Latent:
    """The latents of an attention module, and what its matrix that expands them does in their stead."""

    def __init__(self, module: Any, sizes: Sizes) -> None:
        self.sizes = sizes
        self._module = module

    def keep(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Stand for the module's `expand_kv`: give [1, 1, T, …] as keys and values of one head."""
        return torch.cat((latent, rotated), dim=-1), latent

    def expansion(self, heads: int) -> Expansion:
        """Return what expands latents, to keys for queries of so many heads."""
        weight: Tensor = self._module.kv_b_proj.weight
        rows = self.sizes.plain + self.sizes.value
        if weight.shape[0] != heads * rows:
            raise UnsupportedAttention(
                f"a rank has queries of {heads} heads and keys of {weight.shape[0] // rows}"
            )
        return Expansion(weight.unflatten(0, (heads, rows)), self.sizes.plain)


def give_latents(model: nn.Module) -> None:
    """Have modules keep latents whose code expands them, if those are smaller and proved to be the same."""
    proved: dict[tuple[type, Sizes], bool] = {}
    for module in model.modules():
        sizes = _sizes_of(module)
        if sizes is None:
            continue
        key = type(module), sizes
        if key not in proved:
            proved[key] = _expands(module, sizes)
        if proved[key]:
            latent = Latent(module, sizes)
            module.quire_latent, module.expand_kv = latent, latent.keep  # type: ignore[assignment]


def latent_of(module: nn.Module) -> Latent | None:
    """Return what `give_latents` gave a module."""
    return getattr(module, "quire_latent", None)


def _sizes_of(module: Any) -> Sizes | None:
    """Return the sizes of a module that by its parts may have latents, and keep less with them."""
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    found = [getattr(module, name, None) for name in names]
    expands = getattr(module, "kv_b_proj", None)
    if not all(isinstance(size, int) and size > 0 for size in found) or type(expands) is not nn.Linear:
        return None
    sizes = Sizes(*found)  # type: ignore[arg-type]
    rows = sizes.plain + sizes.value
    if expands.bias is not None or expands.in_features != sizes.latent or expands.out_features % rows:
        return None
    heads = expands.out_features // rows
    smaller = sizes.latent + sizes.rotated < 2 * heads * sizes.head_dim
    fits = sizes.latent <= MOST_LATENT and sizes.rotated <= MOST_REST
    return sizes if smaller and fits and hasattr(module, "expand_kv") else None


def _expands(module: Any, sizes: Sizes) -> bool:
    """Tell whether a module's own code makes of latents what is taken of it here, by that of two heads."""
    heads, tokens = 2, 3
    generator = torch.Generator().manual_seed(sizes.latent)
    own = copy.copy(module)
    own.__dict__["_modules"] = dict(module._modules)
    own.kv_b_proj = nn.Linear(sizes.latent, heads * (sizes.plain + sizes.value), False, "cpu", torch.float32)
    latent = torch.randn(1, 1, tokens, sizes.latent, generator=generator)
    rotated = torch.randn(1, 1, tokens, sizes.rotated, generator=generator)
    weight = torch.randn(heads, sizes.plain + sizes.value, sizes.latent, generator=generator)
    weight /= sizes.latent**0.5
    own.kv_b_proj.weight.data = weight.flatten(0, 1)
    expected = (latent[0] @ weight.mT).split([sizes.plain, sizes.value], dim=-1)
    keys = torch.cat((expected[0], rotated[0].expand(heads, -1, -1)), dim=-1)
    try:
        with torch.no_grad():
            theirs = type(module).expand_kv(own, latent, rotated)
    except Exception:  # modelling code may want anything
        return False
    return len(theirs) == 2 and all(
        isinstance(one, Tensor) and one.shape == other.shape and torch.allclose(one, other, atol=_TOLERANCE)
        for one, other in zip(theirs, (keys[None], expected[1][None]), strict=True)
    )
