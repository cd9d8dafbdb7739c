"""Whether a chat template reads a message's content as parts, each with a type, and not as text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, SupportsIndex

from jinja2 import nodes

_CONTENT = "content"
# By which a template tells text from parts: it takes either then.
_TESTS = frozenset({"string", "sequence", "iterable", "mapping"})


def takes_parts_alone(template: nodes.Template) -> bool:
    """Return whether a template goes through parts of a message's content, and never asks if that is text.

    Text would be gone through by its letters, of which none has a type, and be left out without a word.
    """
    bound = set(_bound_to_content(template))
    loops = (loop for loop in template.find_all(nodes.For) if _is_content(loop.iter, bound))
    asked = (test.node for test in template.find_all(nodes.Test) if test.name in _TESTS)
    return any(map(_reads_parts, loops)) and not any(_is_content(each, bound) for each in asked)


class TextInParts(str):
    """A message's text, which is a part of its content where a template goes through that.

    Elsewhere it is text: templates may go through what some roles say, and write out what others do.
    """

    @property
    def _parts(self) -> list[dict[str, str]]:
        return [{"type": "text", "text": str(self)}] if self else []

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts)

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        return super().__getitem__(key) if isinstance(key, slice) else self._parts[key]


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text is a part of its content."""
    text = message.get(_CONTENT)
    return {**message, _CONTENT: TextInParts(text)} if isinstance(text, str) else message


def _reads_parts(loop: nodes.For) -> bool:
    """Return whether a loop over content reads fields of what it finds, which letters do not have."""
    target = loop.target.name if isinstance(loop.target, nodes.Name) else None
    read: list[nodes.Getattr | nodes.Getitem] = []
    for part in loop.body:
        read += [*part.find_all(nodes.Getattr), *part.find_all(nodes.Getitem)]
    return any(isinstance(each.node, nodes.Name) and each.node.name == target for each in read)


def _bound_to_content(template: nodes.Template) -> Iterator[str]:
    """Yield the names that a template gives content: of variables, and of what its macros take."""
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, set()):
            yield assignment.target.name
    macros = {macro.name: macro.args for macro in template.find_all(nodes.Macro)}
    for call in template.find_all(nodes.Call):
        taken = macros.get(call.node.name, []) if isinstance(call.node, nodes.Name) else []
        given = zip(taken, call.args, strict=False)  # others have defaults
        yield from (name.name for name, value in given if _is_content(value, set()))


def _is_content(value: nodes.Node | None, bound: set[str]) -> bool:
    """Return whether it is a message's content, or what a filter leaves of it. bound: names that are that."""
    match value:
        case nodes.Name(name=name):
            return name in bound
        case nodes.Getattr(attr=attr):
            return attr == _CONTENT
        case nodes.Getitem(arg=nodes.Const(value=key)):
            return key == _CONTENT
        case nodes.Filter(node=inner):
            return _is_content(inner, bound)
        case nodes.CondExpr() | nodes.Or() | nodes.And():
            return any(_is_content(each, bound) for each in chain(value.iter_child_nodes()))
    return False
