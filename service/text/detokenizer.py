"""Token ids to text, piece by piece: the pieces together are what decoding all ids at once gives.

Two kinds of tokenizer cover what models use. In a byte-level one every token is some bytes and the text
is their UTF-8. In the others (SentencePiece-like, WordPiece) a token adds the same text wherever it
stands, but at the very start, and but for byte tokens, which count as a run.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from typing import Protocol

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Detokenizer(Protocol):
    """One sequence's text so far. A character is let out only when it is whole."""

    def push(self, tokens: list[int]) -> str:
        """Return the text that `tokens` add and settle."""
        ...

    def finish(self) -> str:
        """Return the text still held back, when no more tokens come; what is incomplete becomes U+FFFD."""
        ...


class Pieces(Protocol):
    """The bytes or texts that a vocabulary's tokens stand for."""

    def token_bytes(self, token: int) -> bytes:
        """Return what it adds within a text. It is looked up once, and kept."""
        ...

    def detokenizer(self, context: list[int], skip: frozenset[int]) -> Detokenizer:
        """For a sequence that continues `context` (empty: starts a text). Tokens in `skip` add nothing."""
        ...


def pieces_of(backend: Backend, decoders: list[str]) -> Pieces:
    """`decoders` are the types in the tokenizer's decoder, in order."""
    if decoders == ["ByteLevel"]:
        return ByteLevelPieces(backend)
    return TextPieces(backend, "ByteFallback" in decoders)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: visible Latin-1 is itself, the rest follows 0x100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


class ByteLevelPieces:
    def __init__(self, backend: Backend) -> None:
        self._tables: dict[frozenset[int], _ByteTable] = {}
        self._backend = backend
        self._all = _ByteTable(backend, frozenset())

    def token_bytes(self, token: int) -> bytes:
        return self._all[token]

    def detokenizer(self, context: list[int], skip: frozenset[int]) -> Detokenizer:
        if skip not in self._tables:
            self._tables[skip] = _ByteTable(self._backend, skip)
            self._tables[skip].update(self._all | self._tables[skip])
        return _ByteLevelDetokenizer(self._tables[skip])


class _ByteTable(dict[int, bytes]):
    """Token id to bytes, filled as it is used."""

    def __init__(self, backend: Backend, skip: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(skip, b""))
        self._backend = backend

    def __missing__(self, token: int) -> bytes:
        text = (
            self._backend.id_to_token(token) or ""
        )  # a model's vocabulary may be padded past the tokenizer's
        try:
            piece = bytes(_ALPHABET[char] for char in text)
        except KeyError:  # an added token is written as it is
            piece = text.encode()
        self[token] = piece
        return piece


class _ByteLevelDetokenizer:
    __slots__ = ("_rest", "_table")

    def __init__(self, table: _ByteTable) -> None:
        self._table = table
        self._rest = b""

    def push(self, tokens: list[int]) -> str:
        table = self._table
        data = self._rest + (table[tokens[0]] if len(tokens) == 1 else b"".join([table[t] for t in tokens]))
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def finish(self) -> str:
        text, _ = utf_8_decode(self._rest, "replace", True)
        self._rest = b""
        return text


class TextPieces:
    """Raises ValueError if the vocabulary has no plain token to measure others against."""

    def __init__(self, backend: Backend, byte_fallback: bool) -> None:
        self._backend = backend
        self._byte_fallback = byte_fallback
        self._anchor, self._anchor_text = self._find_anchor()
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, int | None] = {}
        self.absent: set[int] = set()  # ids looked at that the vocabulary does not have

    def _find_anchor(self) -> tuple[int, str]:
        for token in range(self._backend.get_vocab_size(with_added_tokens=False)):
            text = self._backend.decode([token], skip_special_tokens=False)
            if text.isascii() and text.isalnum():
                return token, text
        raise ValueError(
            "the tokenizer has no token of plain letters or digits: its decoder cannot be followed"
        )

    def byte_of(self, token: int) -> int | None:
        """Return the byte that a byte-fallback token stands for, else None."""
        if token not in self._bytes:
            name = self._backend.id_to_token(token)
            if name is None:
                self.absent.add(token)
            match = _BYTE_TOKEN.fullmatch(name) if name and self._byte_fallback else None
            self._bytes[token] = int(match.group(1), 16) if match else None
        return self._bytes[token]

    def text(self, token: int) -> str:
        """Return what `token` adds within a text."""
        if token not in self._texts:
            self._texts[token] = self.continuation([token])
        return self._texts[token]

    def continuation(self, tokens: list[int]) -> str:
        """Return what `tokens` add within a text."""
        text = self._backend.decode([self._anchor, *tokens], skip_special_tokens=False)
        return text[len(self._anchor_text) :]

    def beginning(self, tokens: list[int]) -> str:
        """Return `tokens` as a text of their own."""
        return self._backend.decode(tokens, skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        byte = self.byte_of(token)
        return self.text(token).encode() if byte is None else bytes([byte])

    def detokenizer(self, context: list[int], skip: frozenset[int]) -> Detokenizer:
        return _TextDetokenizer(self, bool(context), skip)


class _TextDetokenizer:
    __slots__ = ("_held", "_pieces", "_skip", "_started")

    def __init__(self, pieces: TextPieces, started: bool, skip: frozenset[int]) -> None:
        self._pieces = pieces
        self._skip = skip
        self._started = started  # some text has come, so that what follows no longer depends on the start
        self._held: list[int] = []  # until started all tokens, then the open run of byte tokens

    def push(self, tokens: list[int]) -> str:
        pieces, out = self._pieces, ""
        for token in tokens:
            byte = pieces.byte_of(token)
            if token in self._skip or token in pieces.absent:  # they do not even end a run of bytes
                continue
            if byte is not None:
                self._held.append(token)
            elif self._started:
                out += self._release() + pieces.text(token)
            else:
                self._held.append(token)
                out = pieces.beginning(self._held)
                if out:
                    self._started = True
                    self._held = []
        return out

    def _release(self) -> str:
        if not self._held:
            return ""
        held, self._held = self._held, []
        return self._pieces.continuation(held) if self._started else self._pieces.beginning(held)

    def finish(self) -> str:
        return self._release()
