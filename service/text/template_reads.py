"""Whether a chat template reads a field of messages, as far as its text can tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain

from jinja2 import nodes

_OF_TOOLS = frozenset({"tools", "tool_calls", "function"})
_SHOWS_ALL = frozenset({"tojson", "items", "dictsort", "string", "pprint"})  # filters
_PASSES = 8  # over what is bound to names; as many names may be bound to one another
_Index = nodes.Getattr | nodes.Getitem


def reads_of_messages(template: nodes.Template, field: str) -> bool:
    """Return whether it may read `field` of a message.

    It does not if all that it reads so is a tool's or a call's, and it shows no message whole.
    """
    return _Reading(template).reads(field)


class _Reading:
    def __init__(self, template: nodes.Template) -> None:
        self._template = template
        # What a name may stand for; None: anything.
        self._bound: defaultdict[str, list[nodes.Node | None]] = defaultdict(list)
        for loop in template.find_all(nodes.For):
            self._bind(loop.target, loop.iter)
        for assignment in template.find_all(nodes.Assign):
            self._bind(assignment.target, assignment.node)
        for macro in template.find_all(nodes.Macro):
            for parameter in macro.args:
                self._bind(parameter, None)
        self._tools: set[str] = {"tools"}
        self._messages: set[str] = {"messages"}
        for _ in range(_PASSES):
            for name, values in self._bound.items():
                if all(value is not None and self._is_tool(value) for value in values):
                    self._tools.add(name)
                if any(value is not None and self._is_message(value) for value in values):
                    self._messages.add(name)

    def reads(self, field: str) -> bool:
        return any(not self._is_tool(read) for read in self._reads_of(field)) or self._shows_all()

    def _bind(self, target: nodes.Node, value: nodes.Node | None) -> None:
        if isinstance(target, nodes.Name):
            self._bound[target.name].append(value)
        else:  # several names at once
            for name in target.find_all(nodes.Name):
                self._bound[name.name].append(None)

    def _reads_of(self, field: str) -> Iterator[nodes.Node]:
        """Yield what the field is read of; of a filter such as `map`, what goes through it."""
        find = self._template.find_all
        yield from (each.node for each in find(nodes.Getattr) if each.attr == field)
        yield from (each.node for each in find(nodes.Getitem) if _key(each) == field)
        for through in find(nodes.Filter):
            if through.node is not None and _is_given(through, field):
                yield through.node
        for called in find(nodes.Call):
            method = called.node
            if isinstance(method, nodes.Getattr) and method.attr == "get" and _is_given(called, field):
                yield method.node

    def _shows_all(self) -> bool:
        shown: Iterator[nodes.Node | None] = chain(
            (each.node for each in self._template.find_all(nodes.Filter) if each.name in _SHOWS_ALL),
            *(each.nodes for each in self._template.find_all(nodes.Output)),
            *(each.args for each in self._template.find_all(nodes.Call)),  # a macro may show it
        )
        return any(each is not None and self._is_message(each) for each in shown)

    def _is_tool(self, value: nodes.Node) -> bool:
        """Return whether it is a tool, a call, or several."""
        match value:
            case nodes.Name(name=name):
                return name in self._tools
            case nodes.Getattr() | nodes.Getitem() if isinstance(_key(value), str):
                return _key(value) in _OF_TOOLS
            case nodes.Getitem(node=inner) | nodes.Or(left=inner) | nodes.And(right=inner):
                return self._is_tool(inner)
            case nodes.Filter(node=inner):
                return inner is not None and self._is_tool(inner)
        return False

    def _is_message(self, value: nodes.Node) -> bool:
        """Return whether it is a message, or several."""
        match value:
            case nodes.Name(name=name):
                return name in self._messages
            case nodes.Getitem(node=inner) if not isinstance(_key(value), str):
                return self._is_message(inner)
            case nodes.Filter(node=inner, name=name):
                return name != "length" and inner is not None and self._is_message(inner)
        return False


def _is_given(called: nodes.Call | nodes.Filter, field: str) -> bool:
    given = chain(called.args, (argument.value for argument in called.kwargs))
    return any(isinstance(value, nodes.Const) and value.value == field for value in given)


def _key(read: _Index) -> object:
    """Return what is read of something: a field's name, a place, or None if that is computed."""
    if isinstance(read, nodes.Getattr):
        return read.attr
    return read.arg.value if isinstance(read.arg, nodes.Const) else None
