"""Whether a chat template shows the names of those who speak, by its text."""

from __future__ import annotations

import pytest

from quire.service.errors import TemplateError
from quire.service.text.template import ChatTemplate
from tests.service.tool_templates import HERMES, LLAMA


def of_each(body: str) -> str:
    return f"{{% for message in messages %}}{body}{{% endfor %}}"


READ = [
    of_each("{{ message.name }}"),
    of_each("{{ message['name'] }}"),
    of_each("{{ message.get('name') or message.role }}"),  # Kimi's
    of_each("{% set speaker = message['name'] if 'name' in message else message['role'] %}{{ speaker }}"),
    of_each("{{ message | tojson }}"),
    of_each("{{ message }}"),
    of_each("{% for key, value in message | items %}{{ value }}{% endfor %}"),
    "{{ messages | tojson }}",
    "{{ messages[0].name }}",
    "{{ messages | map(attribute='name') | join }}",
    "{% set rest = messages[1:] %}{% for turn in rest %}{{ turn.name }}{% endfor %}",
    "{% macro say(turn) %}{{ turn.name }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "{% macro say(turn) %}{{ turn | tojson }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "{% for it in tools %}{{ it.name }}{% endfor %}{% for it in messages %}{{ it.name }}{% endfor %}",
]
NOT_READ = [
    HERMES,
    LLAMA,
    of_each("{{ message.role }}: {{ message.content }}"),
    of_each("{{ message.content | tojson }}{{ messages | length }}"),
    of_each("{% for call in message.tool_calls or [] %}{{ call.name }}{{ call.function.name }}{% endfor %}"),
    of_each("{% for c in message['tool_calls'] %}{% set f = c.function %}{{ f['name'] }}{% endfor %}"),
    "{% for tool in tools %}{{ tool.name }}{{ (tool.function or tool).name }}{% endfor %}",
    "{% if tools %}{% set first = tools[0] %}{{ first.name }}{{ tools | map(attribute='name') }}{% endif %}",
    "{% set ns = namespace(last=messages | length - 1) %}{{ messages[ns.last].content }}",
]


def test_a_template_too_deep_to_be_read_is_none() -> None:
    """It could not be compiled, either."""
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate("{{ messages" + " + messages" * 5000 + " }}", {})


@pytest.mark.parametrize("source", READ)
def test_what_may_read_names(source: str) -> None:
    assert ChatTemplate(source, {}).reads_names


@pytest.mark.parametrize("source", NOT_READ)
def test_what_reads_names_of_tools_and_calls_alone(source: str) -> None:
    assert not ChatTemplate(source, {}).reads_names
