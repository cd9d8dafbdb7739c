"""Advice: what limits requests, and which flag to change."""

from __future__ import annotations

from quire.engine.config import EngineConfig, EngineInfo

MORE_ROOM = "raise --gpu-memory-utilization, lower --max-num-batched-tokens"
SMALLER_CACHES = {"fp8_e4m3": "", "fp12_e4m7": "fp8_e4m3"}  # others: either of them


def advise(info: EngineInfo, config: EngineConfig) -> list[str]:
    """Return one sentence for each limit."""
    advice = [too_long(info, config)]
    if not advice[0] and info.num_blocks < 2 * info.blocks_for(info.max_model_len):
        more = _more_room(info, config)
        advice.append(f"Two of the longest requests do not fit at once, and one has to yield: {more}.")
    if info.num_host_blocks == 0:
        advice.append("Requests that yield are computed again: --swap-space gives them host memory to go to.")
    return [sentence for sentence in advice if sentence]


def too_long(info: EngineInfo, config: EngineConfig) -> str:
    """Return advice on a KV cache that the longest requests do not fit; else nothing."""
    if info.max_request_tokens >= info.max_model_len:
        return ""
    return (
        f"The KV cache holds no request of the {info.max_model_len:,} tokens that the model takes: "
        f"{_more_room(info, config)}, or say so with --max-model-len {info.max_request_tokens}."
    )


def _more_room(info: EngineInfo, config: EngineConfig) -> str:
    if config.num_gpu_blocks_override is not None:
        return (
            f"give more than {config.num_gpu_blocks_override:,} as --num-gpu-blocks-override, or leave it out"
        )
    if info.device == "cpu":
        return "free some memory, or give --num-gpu-blocks-override"
    smaller = SMALLER_CACHES.get(info.kv_cache_dtype, "fp12_e4m7 or fp8_e4m3")
    return MORE_ROOM + (f", or try --kv-cache-dtype {smaller}" if smaller else "")
