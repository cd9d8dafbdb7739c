"""Where an assistant's turn ends, by a chat template that the model's own end of text knows nothing of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.service.errors import TemplateError

if TYPE_CHECKING:
    from quire.service.text.template import ChatTemplate

_SAID, _NEXT = "what was said", "what is asked next"


@dataclass(frozen=True)
class TurnEnd:
    """Strings and tokens that end a turn, beside the model's own."""

    strings: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, template: ChatTemplate, added_tokens: Mapping[str, int]) -> TurnEnd:
        """Find how the template ends what an assistant said; by nothing if that cannot be told.

        A token that was added to the vocabulary may have no text when it comes, so it is looked for itself.
        """
        text = _ending(template)
        if not text:
            return cls()
        return cls(tokens=(added_tokens[text],)) if text in added_tokens else cls(strings=(text,))


def _ending(template: ChatTemplate) -> str:
    """Return what follows a turn, or where nothing does what begins the next one."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _SAID}]
    try:
        _, found, after = template.render(said, add_generation_prompt=False).partition(_SAID)
        asked = [*said, {"role": "user", "content": _NEXT}]
        _, _, further = template.render(asked, add_generation_prompt=False).partition(_SAID)
    except TemplateError:
        return ""
    if not found:
        return ""
    return after.strip() or further.partition(_NEXT)[0].rstrip()
