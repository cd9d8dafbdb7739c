"""Recipes: the ways of an operation, of which the first that is right and quick is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Case = TypeVar("Case")
Op = TypeVar("Op")


@dataclass(frozen=True, slots=True)
class Recipe(Generic[Case, Op]):
    """One way of an operation.

    supports: whether it is right for a case, never tuned. prefers: whether it is quicker than those behind
    it. make: the function that does it.
    """

    name: str
    supports: Callable[[Case], bool]
    prefers: Callable[[Case], bool]
    make: Callable[[Case], Op]


@dataclass(frozen=True, slots=True)
class Chosen(Generic[Op]):
    """An operation's function, and the name of its recipe."""

    name: str
    run: Op


def choose(table: tuple[Recipe[Case, Op], ...], case: Case) -> Chosen[Op]:
    """Return the first recipe that supports and prefers the case."""
    for recipe in table:
        if recipe.supports(case) and recipe.prefers(case):
            return Chosen(recipe.name, recipe.make(case))
    raise LookupError(f"no recipe takes {case}")


def always(case: object) -> bool:
    return True
