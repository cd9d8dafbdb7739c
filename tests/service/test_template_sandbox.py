"""A chat template is a program that came with a checkpoint: it ends, and its text has a size."""

from __future__ import annotations

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.service.errors import TemplateError
from quire.service.text.template import ChatTemplate
from quire.service.text.template_sandbox import MAX_CHARS

MESSAGES = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ caller() }}{% endmacro %}"
    "{% for i in range(99999) if i %}{% for j in range(99999) %}"
    "{% call f() %}x{% endcall %}{% endfor %}{% endfor %}",
]
HUGE = ["{{ 'a' * 10 ** 9 }}", "{{ [1] * 10 ** 12 }}", "{{ 10 ** 1000000000 }}", "{{ 10 ** 9 * messages }}"]


@pytest.mark.parametrize("source", ENDLESS)
def test_endless_ones_are_ended(source: str) -> None:
    with pytest.raises(TemplateError, match=r"took longer than 0\.05 s"):
        ChatTemplate(source, {}, time_limit=0.05).render(MESSAGES, add_generation_prompt=True)


@pytest.mark.parametrize("source", HUGE)
def test_huge_products_are_refused(source: str) -> None:
    with pytest.raises(TemplateError, match=r"more than 64|longer than"):
        ChatTemplate(source, {}).render(MESSAGES, add_generation_prompt=True)


def test_a_prompt_has_a_size() -> None:
    source = "{% set part = 'a' * 4194304 %}{% for i in range(17) %}{{ part }}{% endfor %}"
    with pytest.raises(TemplateError, match=str(17 * 4194304)):
        ChatTemplate(source, {}).render(MESSAGES, add_generation_prompt=True)
    assert MAX_CHARS < 17 * 4194304


PARTS = [
    "{{ loop.index }}{{ m.role }}",
    "{% for c in m.content %}{{ c }}{% if loop.last %};{% endif %}{% endfor %}",
    "{{ m.content * 3 }}{{ 2 ** 3 }}",
    "{{ show(m.content) }}",
    "{% call wrap() %}{{ m.role }}{% endcall %}",
    "{% if m.role == 'user' %}{% continue %}{% endif %}",
]
MACROS = "{% macro show(text) %}<{{ text }}>{% endmacro %}{% macro wrap() %}[{{ caller() }}]{% endmacro %}"


@given(st.lists(st.sampled_from(PARTS), max_size=5))
def test_bounds_change_no_prompt(parts: list[str]) -> None:
    source = MACROS + "{% for m in messages %}" + "".join(parts) + "{% endfor %}"
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    rendered = ChatTemplate(source, {}).render(MESSAGES, add_generation_prompt=True)
    assert rendered == plain.from_string(source).render(messages=MESSAGES)
