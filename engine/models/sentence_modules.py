"""The modules that sentence-transformers makes a model of, as modules.json of a folder lists them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.engine.models.json_fields import Fields, read_json

KINDS = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")  # in the order that they have
_SEVERAL = "Dense"  # there may be more than one of it


class _Module(msgspec.Struct):
    type: str = ""  # a class, whose package depends on the release that wrote it
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


class SentenceModules(NamedTuple):
    """A folder's modules, in the order in which they compute."""

    folder: Path
    modules: tuple[_Module, ...]

    @property
    def file(self) -> Path:
        return self.folder / "modules.json"

    @property
    def kinds(self) -> list[str]:
        return [module.kind for module in self.modules]

    def paths(self, kind: str) -> list[str]:
        """Return in which folders of the model's the modules of a kind are."""
        return [module.path for module in self.modules if module.kind == kind]

    def config(self, kind: str) -> Fields | None:
        """Return the configuration of the only module of a kind, None if there is none. Raises ValueError."""
        for path in self.paths(kind):
            file = self.folder / path / "config.json"
            raw = read_json(file)
            if raw is None:
                raise ValueError(f"{file} is missing, which modules.json names")
            return Fields(raw, str(file))
        return None

    def check(self) -> None:
        """Raise ValueError for a module that is not computed here, or not in that place."""
        for module in self.modules:
            if module.kind not in KINDS:
                raise ValueError(
                    f"{self.file}: the module {module.type!r} is not supported; it must be one of "
                    f"{', '.join(KINDS)}"
                )
        places = [KINDS.index(kind) for kind in self.kinds]
        once = [kind for kind in self.kinds if kind != _SEVERAL]
        if places != sorted(places) or len(once) > len(set(once)):
            raise ValueError(
                f"{self.file}: modules in the order {', '.join(self.kinds)} are not supported; it must be "
                f"{', '.join(KINDS)}, each of them once, but {_SEVERAL}"
            )
        if _SEVERAL in self.kinds and "Pooling" not in self.kinds:
            raise ValueError(f"{self.file}: {_SEVERAL} without Pooling before it is not supported")
        for path in self.paths("Normalize"):
            file = self.folder / path / "config.json"
            fields = Fields(read_json(file) or {}, str(file))  # old folders have none
            for name in ("module_input_name", "module_output_name"):
                fields.refuse_unless(name, None, "sentence_embedding")


def read_modules(folder: Path) -> SentenceModules | None:
    """Return the modules of a folder; None: it is none of sentence-transformers'. Raises ValueError."""
    file = folder / "modules.json"
    if not file.is_file():
        return None
    try:
        modules = msgspec.json.decode(file.read_bytes(), type=tuple[_Module, ...])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} must hold a list of modules: {error}") from None
    return SentenceModules(folder, modules)
