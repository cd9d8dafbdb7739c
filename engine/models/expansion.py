"""Quantised weights are read as the numbers that they stand for, and others rounded if that is asked for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from quire.engine.models.bitsandbytes_files import expand_bitsandbytes
from quire.engine.models.expanded_file import ExpandedFile
from quire.engine.models.float8 import Float8
from quire.engine.models.float8_files import expand_float8
from quire.engine.models.fours_files import OF_COMPRESSED, OF_MODELOPT, OF_MXFP4, expand_fours
from quire.engine.models.hqq_files import expand_hqq
from quire.engine.models.kept_weights import Kept, bits_of
from quire.engine.models.measured_cache import OF_CACHES
from quire.engine.models.modelopt import MODELOPT_NVFP4
from quire.engine.models.packed import Packed
from quire.engine.models.packed_files import expand_packed
from quire.engine.models.quantisation import (
    BITSANDBYTES,
    COMPRESSED_MXFP4,
    GGUF,
    HQQ,
    MXFP4,
    NVFP4,
    ROUNDED,
    Measured,
    Quantised,
)
from quire.engine.models.rounded_files import round_files

logger = logging.getLogger("quire.engine")


def expand_files(
    files: list[Any], quantised: Quantised | None, dtype: torch.dtype, device: torch.device
) -> list[Any]:
    """Return open files as if they had the numbers that weights stand for, in a dtype on a device.

    Those with weights in MXFP4 stay as they are: see `mxfp4_files.expand_mxfp4`. Raises ValueError for
    weights that do not fit, by name.
    """
    if isinstance(quantised, Measured):
        hidden = {name for file in files for name in file.offset_keys() if name.endswith(OF_CACHES)}
        files = [ExpandedFile(file, {}, hidden) for file in files]
        return expand_files(files, quantised.weights, dtype, device)
    if isinstance(quantised, Float8):
        return list(expand_float8(files, quantised, dtype, device))
    if isinstance(quantised, Packed):
        return list(expand_packed(files, quantised, dtype, device))
    if quantised == BITSANDBYTES:
        return list(expand_bitsandbytes(files, dtype, device))
    if quantised == HQQ:
        return list(expand_hqq(files, dtype, device))
    if quantised == NVFP4:
        return list(expand_fours(files, OF_COMPRESSED, dtype, device))
    if quantised == COMPRESSED_MXFP4:
        return list(expand_fours(files, OF_MXFP4, dtype, device))
    if quantised == MODELOPT_NVFP4:
        return list(expand_fours(files, OF_MODELOPT, dtype, device))
    if quantised == ROUNDED:
        return list(round_files(files, dtype, device))
    if quantised == GGUF:
        from quire.engine.models.gguf.tensors import expand_gguf

        return list(expand_gguf(files, dtype, device))
    return files


def tell_expanded(quantised: Quantised, dtype: torch.dtype, kept: Kept | None = None) -> None:
    """Log in how many times their bytes weights are held, or which are kept and why others are not."""
    name = str(dtype).removeprefix("torch.")
    if isinstance(quantised, Measured):
        if quantised.weights is not None:
            tell_expanded(quantised.weights, dtype, kept)
        logger.info(
            "files may have scales for a KV cache of %s; they are not used: the cache has the format of "
            "--kv-cache-dtype",
            quantised.cache,
        )
        return
    if quantised == ROUNDED:
        kept = kept or Kept()
        count = len(kept.formats)
        logger.info(
            "weights are rounded to 8-bit floats, a scale for each row: answers are not those of the "
            "folder's own numbers; %s",
            f"{count} of {kept.of} are kept so" if count else f"those of layers are loaded as {name} numbers",
        )
        if count and kept.reasons:
            logger.info("others are loaded as %s numbers: %s", name, _listed(kept.reasons))
    elif kept is not None and kept.formats:
        logger.info(
            "%d weights of %s are kept in %s bits, as files have them%s; activations are not rounded",
            len(kept.formats),
            kept.of,
            " and ".join(map(str, bits_of(kept.formats))),
            f"; others are loaded as {name} numbers: {_listed(kept.reasons)}" if kept.reasons else "",
        )
    elif isinstance(quantised, Float8):
        logger.info(
            "weights that files have as 8-bit floats are loaded as the %s numbers that they stand for, in %d "
            "times the bytes; activations are not rounded to 8 bits, as they would be in products of FP8",
            name,
            dtype.itemsize,
        )
    elif isinstance(quantised, Packed):
        bits = sorted(set(quantised.bits))
        logger.info(
            "weights that files have as integers of %s bits are loaded as the %s numbers that they stand "
            "for, in %s times the bytes; activations are not rounded",
            " and ".join(map(str, bits)),
            name,
            " and ".join(f"{8 * dtype.itemsize / each:.3g}" for each in bits),
        )
    elif quantised == BITSANDBYTES:
        logger.info(
            "weights that files have as bitsandbytes' codes are loaded as the %s numbers that they stand "
            "for; of 4 bits in %d times the bytes, of 8 in %d; activations are not rounded",
            name,
            2 * dtype.itemsize,
            dtype.itemsize,
        )
    elif quantised == HQQ:
        logger.info(
            "weights that files have as HQQ's integers are loaded as the %s numbers that they stand for; of "
            "4 bits in %d times the bytes; activations are not rounded",
            name,
            2 * dtype.itemsize,
        )
    elif quantised == GGUF:
        logger.info("weights of the GGUF file are loaded as the %s numbers that they stand for", name)
    else:
        powers = quantised in (MXFP4, COMPRESSED_MXFP4)
        numbers, held = (32, 17) if powers else (16, 9)  # of a block, and its bytes
        logger.info(
            "weights that files have in %s are loaded as the %s numbers that they stand for, in %.1f "
            "times the bytes",
            "MXFP4" if powers else "NVFP4",
            name,
            dtype.itemsize * numbers / held,
        )
    if kept is not None and not kept.formats and kept.reasons:
        logger.info("no weights are kept in few bits: %s", _listed(kept.reasons))


def _listed(reasons: Mapping[str, str]) -> str:
    """Return why weights are not kept, and how many by each reason."""
    return ", ".join(f"{reason} ({count})" for reason, count in Counter(reasons.values()).most_common())
