"""Links by which a browser fetches all modules of a page at once: else it finds one in another."""

from __future__ import annotations

import re
from os.path import normpath
from pathlib import Path

_SCRIPT = re.compile(rb' *<script type="module" src="/static/([^"]+)"></script>\n')
_IMPORT = re.compile(r'(?:\bfrom|^import) "(\.[^"]+)"', re.MULTILINE)  # import() is for later


def with_preloads(page: bytes, folder: Path) -> bytes:
    """Return the page with a link for each module that its script imports; `folder` is what /static is."""

    def linked(script: re.Match[bytes]) -> bytes:
        paths = [module.relative_to(folder).as_posix() for module in _imported(folder / script[1].decode())]
        links = [f'    <link rel="modulepreload" href="/static/{path}">\n' for path in paths]
        return "".join(links).encode() + script[0]

    return _SCRIPT.sub(linked, page)


def _imported(script: Path) -> list[Path]:
    """Return the modules that it imports, and those that they import, each once."""
    found = [script]
    for module in found:  # grows meanwhile
        names = _IMPORT.findall(module.read_text(encoding="utf-8"))
        paths = [Path(normpath(module.parent / name)) for name in names]
        found += [path for path in dict.fromkeys(paths) if path not in found]
    return found[1:]
