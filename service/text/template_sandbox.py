"""Where a model's chat template runs: it comes with the checkpoint, so it is as trusted as a download."""

from __future__ import annotations

import time
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

MAX_CHARS = 64 << 20  # of a text or list that a product makes, and of a whole prompt
MAX_EXPONENT = 64


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, which bounds what a template reaches, with bounds on its time and its products.

    `start` begins a rendering. After `time_limit` seconds of processor time (looked at whenever a loop or a
    macro goes round) it ends with SecurityError.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, time_limit: float, **options: Any) -> None:
        super().__init__(**options)
        self._time_limit = time_limit
        self._deadline = float("inf")

    def start(self) -> None:
        self._deadline = time.thread_time() + self._time_limit

    def tick(self) -> None:
        if time.thread_time() > self._deadline:
            raise SecurityError(f"it took longer than {self._time_limit:g} s")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int | float) and abs(right) > MAX_EXPONENT:
            raise SecurityError(f"an exponent of {right} is more than {MAX_EXPONENT}")
        for sequence, count in ((left, right), (right, left)):
            if hasattr(sequence, "__len__") and isinstance(count, int) and len(sequence) * count > MAX_CHARS:
                raise SecurityError(f"a product would be longer than {MAX_CHARS}")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """jinja2 calls it for each source; a tick is put before what may be repeated."""
        template = super()._parse(source, name, filename)
        _Ticks().visit(template)
        return template


class _Ticks(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_tick(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_tick(node)

    def _with_tick(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node
