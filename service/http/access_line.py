"""What the log's line of a request says, beside who asked for what: its cost, and how it failed."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from starlette.types import Scope

from quire.service.errors import ApiError


@dataclass(frozen=True)
class Cost:
    """The work that an answer was; `first_token` is seconds, None if there was none."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token: float | None


def note_failure(scope: Scope, error: ApiError, engine_requests: list[int]) -> None:
    """Have the request's line in the log say how it failed, and the numbers it has in the engine's log."""
    scope["state"]["failure"] = {"error": error.code, "engine_requests": engine_requests}


def note_cost(scope: Scope, cost: Cost) -> None:
    """Have the request's line in the log say what its answer cost."""
    scope["state"]["cost"] = cost


def words_of(scope: Scope, seconds: float) -> str:
    """Return the end of the line."""
    cost: Cost | None = scope["state"].get("cost")
    if cost is None:
        return f"{seconds:.3f} s"
    first = "no token" if cost.first_token is None else f"first after {cost.first_token:.3f} s"
    return (
        f"{cost.prompt_tokens} in, {cost.cached_tokens} cached, {cost.output_tokens} out, {first}, all after "
        f"{seconds:.3f} s"
    )


def fields_of(scope: Scope) -> dict[str, object]:
    """Return the same for programs, with how it failed."""
    cost: Cost | None = scope["state"].get("cost")
    return {**({} if cost is None else asdict(cost)), **scope["state"].get("failure", {})}
