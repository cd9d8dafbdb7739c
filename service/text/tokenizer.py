"""A model's tokenizer: text to ids and back, chat messages to a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from quire.engine.models.added_tokens import tokenizer_fields
from quire.engine.models.tokenizer_json import read_tokenizer
from quire.service.text.detokenizer import Detokenizer, pieces_of
from quire.service.text.longest_token import longest_token
from quire.service.text.model_templates import templates_of, usual_template
from quire.service.text.named_templates import template_of
from quire.service.text.template import ChatTemplate
from quire.service.text.turn_end import TurnEnd

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_PAIR_ROLES = ("query", "document")


class Tokenizer:
    """`chat_template` is None for a model that has none. Ids outside the vocabulary decode to nothing."""

    def __init__(
        self,
        backend: Backend,
        chat_template: ChatTemplate | None = None,
        *,
        is_own: bool = True,
        eos: str | None = None,
    ) -> None:
        """is_own: the template is the model's, which then ends its turns itself. eos: what ends a text."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template
        added_tokens = backend.get_added_tokens_decoder()
        self.special = frozenset(token for token, added in added_tokens.items() if added.special)
        self._added = {added.content: token for token, added in added_tokens.items()}
        self.eos = None if eos is None else backend.token_to_id(eos)  # a model may have others beside it
        self.pair_template: ChatTemplate | None = None  # of messages of the roles query and document
        if chat_template is not None and (not is_own or _knows_pairs(chat_template)):
            self.pair_template = chat_template
        self.turn_end = TurnEnd()
        if chat_template is not None and not is_own:
            self.turn_end = TurnEnd.of(chat_template, self._added)
        described = json.loads(backend.to_str())
        self._pieces = pieces_of(backend, _decoder_types(described["decoder"]))
        self._longest_token = longest_token(described)
        self._texts: dict[int, str] = {}

    @classmethod
    def from_folder(
        cls, folder: str | Path, template: str | None = None, *, lower_case: bool = False
    ) -> Tokenizer:
        """Read what `save_pretrained` wrote. Raises ValueError that says what is missing, or wrong.

        template: a chat template to use instead of the model's usual one, as --chat-template has it: the name
        of one of its others, of one of ours, or a file. lower_case: letters of a text become small ones.
        """
        folder = Path(folder)
        backend = read_tokenizer(folder)
        if lower_case:
            first = [Lowercase()] if backend.normalizer is None else [Lowercase(), backend.normalizer]
            backend.normalizer = NormalizerSequence(first)
        config = tokenizer_fields(folder)
        special = _special_tokens(config)
        source, is_own = (
            (usual_template(templates_of(folder, config)), True)
            if template is None
            else template_of(folder, template)
        )
        chat_template = ChatTemplate(source, special) if source else None
        return cls(backend, chat_template, is_own=is_own, eos=special.get("eos_token"))

    def to_json(self) -> str:
        """Return the text of its tokenizer.json."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Without the interpreter's lock, so that in another thread it holds up nobody; as does `decode`."""
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        tokens: list[int] = encoding.ids
        return tokens

    def pair_messages(self, first: str, second: str) -> list[dict[str, Any]]:
        """Return two texts as the messages of a template for them."""
        texts = zip(_PAIR_ROLES, (first, second), strict=True)
        return [{"role": role, "content": text} for role, text in texts]

    def encode_pair(self, first: str, second: str, *, add_special_tokens: bool) -> list[int]:
        """Encode as `encode` does, of two texts that the model is to compare."""
        pair = [(first, second)]
        (encoding,) = self._backend.encode_batch_fast(pair, add_special_tokens=add_special_tokens)
        tokens: list[int] = encoding.ids
        return tokens

    def least_tokens(self, size: int) -> int:
        """Return how many tokens a text of `size` bytes has at least, as far as the vocabulary tells."""
        return 0 if self._longest_token is None else -(-size // self._longest_token)

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        text: str
        (text,) = self._backend.decode_batch([tokens], skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return what `token` stands for within a text."""
        return self._pieces.token_bytes(token)

    def look_up(self, vocab_size: int) -> None:
        """Look up what each token stands for, so that none costs it when it first comes: 2 to 5 µs each."""
        for token in range(vocab_size):
            self._pieces.token_bytes(token)

    def token_text(self, token: int) -> str:
        """Return as `token_bytes` does, with U+FFFD where a token is part of a character."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.token_bytes(token).decode(errors="replace")
        return text

    def token_name(self, token: int) -> str:
        """Return the token as the vocabulary writes it."""
        return self._backend.id_to_token(token) or ""

    def added_token(self, text: str) -> int | None:
        """Return the token that was added to the vocabulary as `text`."""
        return self._added.get(text)

    def detokenizer(
        self, context: list[int], *, skip_special_tokens: bool, shown: tuple[str, ...] = ()
    ) -> Detokenizer:
        """For a sequence that continues `context` (empty: starts a text). `shown` is not skipped."""
        skip = self.special if skip_special_tokens else frozenset()
        if shown:
            skip -= {self._added[text] for text in shown if text in self._added}
        return self._pieces.detokenizer(context, skip)


def _knows_pairs(template: ChatTemplate) -> bool:
    return all(template.mentions(f"'{role}'") or template.mentions(f'"{role}"') for role in _PAIR_ROLES)


def _decoder_types(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _decoder_types(part)]
    return [decoder["type"]]


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return template variables such as `bos_token`; a token is a string, or an object with its `content`."""
    tokens = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
