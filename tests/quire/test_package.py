"""The package `quire` as it is installed: what it gives, and what a process need not import for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[2]


def imported_by(program: str) -> set[str]:
    """Return the names of all modules that a new interpreter has after `program`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return set(done.stdout.split())


def test_names_are_there_when_they_are_asked_for() -> None:
    assert {"LLM", "AsyncLLM", "SamplingParams", "__version__"} <= set(quire.__all__)
    for name in quire.__all__:
        assert getattr(quire, name)
    with pytest.raises(AttributeError, match="it has LLM, AsyncLLM"):
        quire.SamplingParam  # noqa: B018


def test_importing_the_package_imports_nothing_slow() -> None:
    assert not imported_by("import quire") & {"torch", "numpy", "transformers", "starlette"}
    assert not imported_by("import quire.service.commands.serve") & {"torch", "numpy", "transformers"}
    assert "torch" not in imported_by("from quire import AsyncLLM, SamplingParams")


def test_the_version_is_told() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "quire", "--version"], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert told.stdout == f"quire {quire.__version__}\n"


def test_a_wheel_serves_from_anywhere(tmp_path: Path) -> None:
    """Installed beside nothing of this checkout, it has one package, and its model answers."""
    source, wheels, site, elsewhere = (tmp_path / name for name in ("source", "wheels", "site", "elsewhere"))
    elsewhere.mkdir()
    unneeded = shutil.ignore_patterns("__pycache__", "results")
    for folder in ("engine", "kernels", "service", "loadtest", "quire"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=unneeded)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    offline = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *offline, "-w", str(wheels), str(source)], check=True)
    (wheel,) = wheels.glob("quire-*.whl")
    install = [*pip, "install", "--no-deps", "--no-index", "--no-compile", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True)
    assert {path.name for path in site.iterdir() if "." not in path.name} <= {"quire", "bin"}
    command = [sys.executable, "-m", "quire", "generate", "--prompt", "A block table is", "--max-tokens", "8"]
    flags = ["--temperature", "0", "--num-gpu-blocks-override", "64", "--swap-space", "0", "--device", "cpu"]
    done = subprocess.run(
        [*command, *flags],
        check=True,
        capture_output=True,
        text=True,
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert done.stdout.strip()
    where = (
        "import quire.service.http.static as module; print(module.__file__); "
        "print(*dict(module.page_files()), sep='\\n'); "
        "from quire.service.api import docs_page, openapi; docs_page.page(openapi.describe('0'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", where],
        check=True,
        capture_output=True,
        text=True,
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert str(site) in found.stdout
    for name in ("main.js", "vendor/markdown-it-15.0.3/markdown-it.esm.min.mjs"):
        assert f"/static/{name}\n" in found.stdout
