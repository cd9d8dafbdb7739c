"""The API keys that are asked for, and the names that logs call them by."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Key:
    name: str
    digest: bytes

    @property
    def tenant(self) -> str:
        """Return what keeps its holder's cache and streams apart: a function of the key, not of its name."""
        return self.digest.hex()


class KeyRing:
    """The keys that were given, and those of a file, which `reload` reads again.

    Those without a name are called key-1, key-2 and so on, by their place.
    """

    def __init__(self, given: Sequence[str] = (), file: Path | None = None) -> None:
        """Raises ValueError that names the key or the line that is wrong."""
        self._given = given
        self._file = file
        self._keys = self._read()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def reload(self) -> None:
        """Raises ValueError, and keeps the keys that it had, if there is anything wrong with the file."""
        self._keys = self._read()

    def find(self, key: bytes) -> Key | None:
        """Return the key that was given; all are compared each time, in constant time."""
        digest = _digest(key)
        found = [known for known in self._keys if hmac.compare_digest(digest, known.digest)]
        return found[0] if found else None

    def _read(self) -> tuple[Key, ...]:
        lines = [(None, key) for key in self._given] + ([] if self._file is None else _read_file(self._file))
        keys: dict[bytes, Key] = {}
        names: set[str] = set()
        for at, (given, text) in sorted(enumerate(lines, 1), key=lambda line: line[1][0] is None):
            name, digest = given or f"key-{at}", _digest(text.encode())
            if name in names:
                raise ValueError(f"--api-key-file has the name {name} twice: give each key its own")
            if digest in keys and given is not None:
                other = keys[digest].name
                raise ValueError(f"--api-key-file has one key twice, as {other} and {name}: leave one out")
            names.add(name)
            keys.setdefault(digest, Key(name, digest))
        return tuple(keys.values())


def clean_key(text: str, source: str) -> str:
    """Return the key without the white space around it. Raises ValueError that names `source`."""
    key = text.strip()
    if not key:
        raise ValueError(f"{source} is empty: a key is at least one character")
    if not key.isascii():
        raise ValueError(f"{source} must be an ASCII string, as headers are")
    control = next((char for char in key if not char.isprintable()), None)
    if control is not None:
        raise ValueError(
            f"{source} holds the control character U+{ord(control):04X}, which no header can: give a key "
            "each its own --api-key, or its own line of QUIRE_API_KEY or --api-key-file"
        )
    return key


def _read_file(path: Path) -> list[tuple[str | None, str]]:
    """Read a key a line, `name:key` or only the key; empty lines and those that begin with # say nothing."""
    try:
        data = path.read_bytes()
        if len(data) > _MOST_FILE_BYTES:
            raise ValueError(f"--api-key-file {path} is larger than {_MOST_FILE_BYTES} bytes")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"--api-key-file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--api-key-file {path} is not UTF-8 text") from None
    found: list[tuple[str | None, str]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        source = f"--api-key-file {path}, line {number}: the key"
        name, colon, key = line.partition(":")
        if not colon:
            found.append((None, clean_key(line, source)))
            continue
        if not _NAME.fullmatch(name.strip()):
            raise ValueError(
                f"--api-key-file {path}, line {number}: a name must match {_NAME.pattern}; a key that has a "
                "colon needs a name and a colon before it"
            )
        found.append((name.strip(), clean_key(key, source)))
    if not found:
        raise ValueError(f"--api-key-file {path} holds no key: give one a line, as name:key or only the key")
    return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
