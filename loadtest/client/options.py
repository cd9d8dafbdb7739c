"""Check which of the options of `run` and `sweep` go together."""

from __future__ import annotations

import argparse
import math

AT_LEAST_1 = ("concurrency", "processes", "requests", "turns", "n")
AT_LEAST_0 = ("shared_prefix", "beam_width", "think", "refine", "most_token")
ABOVE_0 = ("rate", "burstiness", "timeout", "slo_ttft", "slo_tpot", "slo_latency", "latency_limit")
RECIPE = {"shared_prefix": 0, "turns": 1, "think": 0.0, "n": 1, "beam_width": 0}


def check_options(arguments: argparse.Namespace) -> None:
    """Raise ValueError that names an option which is out of range or would have no effect."""
    for least, names in ((1, AT_LEAST_1), (0, AT_LEAST_0)):
        for name in names:
            value = getattr(arguments, name, None)
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"{_flag(name)} must be at least {least}, got {value}")
    for name in ABOVE_0:
        value = getattr(arguments, name, None)
        if value is not None and not value > 0:
            raise ValueError(f"{_flag(name)} must be more than 0, got {value}")
    without = [*_without_lengths(arguments), *_without_effect(arguments)]
    if without:
        raise ValueError("; ".join(without))


def _without_lengths(arguments: argparse.Namespace) -> list[str]:
    """Return flags of lengths beside a workload or a trace, whose requests are fixed."""
    source = next((name for name in ("trace", "workload") if getattr(arguments, name)), None)
    if source is None:
        return []
    given = [name for name, default in RECIPE.items() if getattr(arguments, name) != default]
    given += [name for name in ("text", "most_token") if getattr(arguments, name)]
    return [f"{', '.join(map(_flag, given))}: goes with --lengths only, not --{source}"] if given else []


def _without_effect(arguments: argparse.Namespace) -> list[str]:
    """Return flags that nothing would heed."""
    is_timed = arguments.command == "sweep" or arguments.rate is not None
    is_drawn = not (arguments.trace or arguments.workload)
    found = []
    if not is_timed and arguments.burstiness is not None:
        found.append("--burstiness has no effect without --rate: it is of the gaps between arrivals")
    if not is_timed and not is_drawn and arguments.seed is not None:
        found.append("--seed has no effect on a workload or trace without --rate: nothing is drawn")
    if is_drawn and arguments.think and arguments.turns == 1:
        found.append("--think has no effect with one turn: give --turns")
    if is_drawn and arguments.most_token is not None and (arguments.text or arguments.api == "chat"):
        found.append("--most-token has no effect on prompts of text")
    return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
