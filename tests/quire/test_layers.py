"""Imports run one way: no circles, lower layers know nothing of higher ones, the service needs no torch.

Read from the source, so that imports inside functions and those for type checking count, too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "kernels", "service", "loadtest")

# Of quire.service, the lowest first. What stands in one line knows nothing of its neighbours.
LAYERS = (
    ("json_objects",),
    ("errors", "shares", "keys", "origins", "inert", "json_fields", "engine_client", "demo"),
    ("config", "watchdog"),
    ("explain", "metrics", "text", "inspector"),
    ("admission", "http", "tracing"),
    ("answer",),
    ("state",),
    ("api",),
    ("app", "router"),
    ("server",),
    ("commands",),
)
LAYER_OF = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}


@cache
def imports() -> dict[str, frozenset[str]]:
    """By module of ours, all modules that it imports: ours by their full names."""
    files = dict(_files())
    return {name: frozenset(_imported(file, files)) for name, file in files.items()}


def _files() -> Iterator[tuple[str, Path]]:
    for folder in (ROOT / "quire", *(ROOT / package for package in PACKAGES)):
        for file in folder.rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            if parts[0] != "quire":
                parts = ("quire", *parts)
            elif parts[1] in PACKAGES:  # by way of a link
                continue
            yield ".".join(parts).removesuffix(".__init__"), file


def _imported(file: Path, ours: Iterable[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, f"{file}: a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in ours else node.module
        elif isinstance(node, ast.Call) and "import_module" in map(_name, (node.func, *node.args)):
            yield from (
                value.value
                for value in node.args
                if isinstance(value, ast.Constant) and isinstance(value.value, str)
            )


def _name(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def reached(start: str) -> dict[str, str | None]:
    """Modules of ours that importing `start` brings, itself included, each with one that imports it."""
    importer: dict[str, str | None] = {start: None}
    left = [start]
    while left:
        module = left.pop()
        for other in imports()[module]:
            if other in imports() and other not in importer:
                importer[other] = module
                left.append(other)
    return importer


def chain(importer: dict[str, str | None], module: str) -> str:
    names = [module]
    while (above := importer[names[-1]]) is not None:
        names.append(above)
    return " -> ".join(reversed(names))


def test_modules_import_each_other_in_no_circle() -> None:
    brings = {module: set(reached(module)) for module in imports()}
    for module, brought in brings.items():
        assert not [other for other in brought if other != module and module in brings[other]], module


def room(module: str) -> str:
    return module.split(".")[2]


def test_every_room_of_the_service_has_its_layer() -> None:
    rooms = {room(module) for module in imports() if module.startswith("quire.service.")}
    assert rooms == set(LAYER_OF)


def test_the_service_imports_only_lower_layers() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        if module.startswith("quire.service.")
        for other in others
        if other.startswith("quire.service.") and room(other) != room(module)
        if LAYER_OF[room(other)] >= LAYER_OF[room(module)]
    ]
    assert not wrong


def test_the_service_reaches_neither_torch_nor_loadtest() -> None:
    for start in imports():
        if not start.startswith("quire.service."):
            continue
        importer = reached(start)
        for module in importer:
            assert not module.startswith("quire.loadtest"), chain(importer, module)
            outside = {name.split(".")[0] for name in imports()[module]}
            assert not outside & {"torch", "triton"}, chain(importer, module)


def test_all_of_the_service_can_be_imported_without_torch() -> None:
    modules = [module for module in imports() if module.startswith("quire.service.")]
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT, timeout=100
    )
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "triton"}
    assert not [module for module in loaded if module.startswith("quire.loadtest")]


# The block manager without an engine, which pages and notebooks play with.
LAB = {f"quire.engine.{name}" for name in ("lab.lesson", "lab.pool", "lab.sequence", "memory.pool")}
# The modules of the engine that its front ends may know: plain data, names, and the client of its process.
FRONT = {"quire.kernels.formats.cache_spec", "quire.kernels.formats.state_spec"} | {
    f"quire.engine.{name}"
    for name in (
        *(
            "arrays",
            "capacity",
            "child",
            "client",
            "config",
            "errors",
            "frames",
            "hashing",
            "logs",
            "messages",
        ),
        *("inspection.messages", "inspection.replay", "lab.paths", "lab.view", "memory.move_kinds"),
        *("records", "request_stream"),
        *("models.adapter_config", "models.added_tokens", "models.attention_shape", "models.cache_groups"),
        *("models.config", "models.model_folders"),
        *("models.float8", "models.generation_config", "models.hub", "models.json_fields"),
        *("models.measured_cache", "models.modelopt", "models.packed"),
        *(f"models.gguf.{name}" for name in ("architectures", "config", "folder", "header", "tokenizer")),
        *("models.pooled_texts", "models.pooling", "models.projection", "models.quantisation"),
        *("models.quantisation_config", "models.rope_config", "models.sentence_modules"),
        "models.tokenizer_json",
        *("registry.bounded_socket", "registry.deployment", "registry.prompt_hasher", "registry.redis"),
        *("sequences.grammar", "threads", "urls"),
    )
}


def package_of(module: str) -> str:
    """Return one of PACKAGES, or `quire` for what stands beside them."""
    name = module.split(".")[1] if "." in module else ""
    return name if name in PACKAGES else "quire"


def test_packages_import_one_way() -> None:
    """Kernels import nothing of ours; the engine, kernels; the service, plain data; the load tests, all."""
    allowed = {
        "kernels": {"kernels"},
        "engine": {"kernels", "engine"},
        "service": {"engine", "service"},
        "loadtest": {*PACKAGES, "quire"},
        "quire": {"kernels", "engine", "service", "quire"},
    }
    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if f"{other}.".startswith("quire.") and package_of(other) not in allowed[package_of(module)]
        if (module, package_of(other)) != ("quire.commands.bench", "loadtest")
    ]
    assert not wrong


def test_the_command_line_imports_load_tests_only_when_they_are_asked_for() -> None:
    for file in (ROOT / "quire/cli.py", *(ROOT / "quire/commands").glob("*.py")):
        tree = ast.parse(file.read_text())
        at_once = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [line for line in at_once if "loadtest" in line or "torch" in line]


def test_the_service_knows_of_the_engine_only_plain_data_and_its_client() -> None:
    wrong = {
        (module, other)
        for module, others in imports().items()
        if package_of(module) == "service" or module in FRONT
        for other in others
        if package_of(other) in ("engine", "kernels") and other not in FRONT | LAB
    }
    assert not wrong
