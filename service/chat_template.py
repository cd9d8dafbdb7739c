"""A model's chat template, rendered in a sandbox as transformers renders it."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from service.errors import TemplateError
from service.template_sandbox import MAX_CHARS, TemplateSandbox
from service.tools.formats import format_of

MAX_TEMPLATE_CHARS = 1 << 20
TIME_LIMIT = 1.0  # seconds; templates take a millisecond


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model is trained on; when serving it is transparent."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Turns messages into a prompt. Raises ValueError if the source is no template."""

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
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template does not compile: {error}") from None
        self._environment = environment
        self._source = source
        self.tool_format = format_of(source)
        self._special_tokens = special_tokens

    def mentions(self, variable: str) -> bool:
        """False if setting `variable` could not change anything."""
        return variable in self._source

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        arguments: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Raises TemplateError with the template's own words."""
        try:
            self._environment.start()
            prompt = self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **self._special_tokens,
                **(arguments or {}),
            )
            if len(prompt) > MAX_CHARS:
                raise TemplateError(f"the model's chat template made a prompt of {len(prompt)} characters")
            return prompt
        except TemplateError:
            raise
        except Exception as error:  # a template is a program of the model's author: anything may come
            raise TemplateError(f"the model's chat template failed: {error}") from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike jinja2's own filter this escapes no HTML: the text is for a model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(f"the model's chat template refused the messages: {message}")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
