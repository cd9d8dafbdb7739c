"""A model's chat template, rendered in a sandbox as transformers renders it.

The sandbox bounds what a template reaches and how often it goes round, but not each operation of it: what
serves renders it in a process of its own (`quire.service.text.template_renderer`).
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from quire.service.errors import TemplateError
from quire.service.text.content_parts import in_parts, takes_parts_alone
from quire.service.text.reasoning.formats import reasoning_format_of
from quire.service.text.template_reads import reads_of_messages
from quire.service.text.template_sandbox import MAX_CHARS, TemplateSandbox
from quire.service.text.tools.formats import format_of

MAX_TEMPLATE_CHARS = 1 << 20
MAX_ERROR_CHARS = 1000  # of what a template says
TIME_LIMIT = 1.0  # seconds of processor time; templates take a millisecond


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model is trained on; when serving it is transparent."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Turns messages into a prompt. Raises ValueError if the source is no template.

    Until it renders it is only parsed: to compile a template evaluates its constants.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], time_limit: float = TIME_LIMIT) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ValueError(
                f"the chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}"
            )
        environment = TemplateSandbox(
            time_limit, trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            parsed = environment.parse(source)
            self.reads_names = reads_of_messages(parsed, "name")
            self.takes_parts_alone = takes_parts_alone(parsed)
        except (jinja2.TemplateError, RecursionError) as error:
            raise _does_not_compile(error) from None
        self._environment = environment
        self.source = source
        self.special_tokens = special_tokens
        self.tool_format = format_of(source)
        self.reasoning_format = reasoning_format_of(source)
        self.reads_thinking = "reasoning_content" in source or ".thinking" in source

    def mentions(self, variable: str) -> bool:
        """Return whether setting `variable` could change anything."""
        return variable in self.source

    def compile(self) -> None:
        """Compile as the first rendering would. Raises ValueError if the source is no template after all."""
        try:
            _ = self._template
        except (jinja2.TemplateError, RecursionError) as error:
            raise _does_not_compile(error) from None

    @cached_property
    def _template(self) -> jinja2.Template:
        return self._environment.from_string(self.source)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        arguments: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Raises TemplateError with the template's own words."""
        self.compile()
        if self.takes_parts_alone:
            messages = [in_parts(message) for message in messages]
        try:
            self._environment.start()
            prompt = self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **self.special_tokens,
                **(arguments or {}),
            )
            if len(prompt) > MAX_CHARS:
                raise TemplateError(f"the model's chat template made a prompt of {len(prompt)} characters")
            return prompt
        except TemplateError as error:
            raise TemplateError(str(error)[:MAX_ERROR_CHARS]) from None
        except MemoryError:
            raise TemplateError("the model's chat template failed: it takes too much memory") from None
        except Exception as error:  # a template is a program of the model's author: anything may come
            raise TemplateError(f"the model's chat template failed: {error}"[:MAX_ERROR_CHARS]) from None


def _does_not_compile(error: Exception) -> TemplateError:
    return TemplateError(f"the model's chat template does not compile: {error}"[:MAX_ERROR_CHARS])


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike jinja2's own filter this escapes no HTML: the text is for a model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(f"the model's chat template refused the messages: {message}")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
