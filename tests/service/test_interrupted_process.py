"""Ctrl-C on what runs offline: a command says so and exits with 130, a program has KeyboardInterrupt."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.waiting import SECONDS

ROOT = Path(__file__).parents[2]
FLAGS = ["--device", "cpu", "--swap-space", "0", "--num-gpu-blocks-override", "400"]

PROGRAM = """
    import signal, time
    from quire.engine.messages import SamplingParams
    from quire.engine.schedule.invariants import check_scheduler
    from quire.llm import LLM

    llm = LLM(device="cpu", dtype="float32", num_gpu_blocks_override=400, swap_space=0)
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    for _ in range(3):
        print("begin", flush=True)
        try:
            llm.generate(["A block table is"] * 8, params)
        except KeyboardInterrupt:
            core = llm.core
            check_scheduler(core.scheduler.state)
            assert not core.has_work and core.scheduler.blocks.pool.num_available == 400
            print("interrupted", flush=True)
        ((answer,),) = llm.generate("A block", SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(answer.token_ids) == 4
    print("end", flush=True)
"""


# Compiles a grammar that never ends.
COMPILING = """
    import threading
    from quire.engine.messages import SamplingParams
    from quire.engine.sequences.grammar import Grammars
    from quire.llm import LLM

    def compile(self, grammar):
        print("begin", flush=True)
        threading.Event().wait()

    Grammars.compile = compile
    llm = LLM(device="cpu", dtype="float32", num_gpu_blocks_override=400, swap_space=0)
    try:
        llm.generate("A block", SamplingParams(grammar="start: \\"a\\""))
    except KeyboardInterrupt:
        assert not llm.core.has_work
        print("interrupted", flush=True)
"""

# Runs `quire` with a Ctrl-C where a module is about to be imported, or where Python itself ends ("exit").
INTERRUPTED = """
    import atexit, runpy, signal, sys

    class Finder:
        def find_spec(self, name, *_):
            if name == module:
                signal.raise_signal(signal.SIGINT)

    module = sys.argv.pop(1)
    sys.meta_path.insert(0, Finder())
    if module == "exit":
        atexit.register(signal.raise_signal, signal.SIGINT)
    runpy.run_module("quire", run_name="__main__", alter_sys=True)
"""


def run(*command: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, *command],  # behind a shell's `&` it is ignored
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_program_that_is_interrupted_goes_on_with_the_same_llm() -> None:
    process = run("-c", textwrap.dedent(PROGRAM))
    assert process.stdout is not None
    try:
        for _ in range(3):
            assert process.stdout.readline() == b"begin\n"
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == b"interrupted\n"
        out, errors = process.communicate(timeout=SECONDS)
        assert (out, process.returncode) == (b"end\n", 0), errors.decode()
        assert errors == b""  # nor how it starts: that is for a terminal
    finally:
        process.kill()
        process.communicate()


def test_a_program_ends_whatever_a_grammars_compilation_does() -> None:
    process = run("-c", textwrap.dedent(COMPILING))
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"begin\n"
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=SECONDS)
        assert (out, errors.decode(), process.returncode) == (b"interrupted\n", "", 0)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_a_command_that_is_interrupted_says_so_in_a_line(command: str) -> None:
    flags = (
        ["--workload", "decode256"] if command == "bench" else ["--prompt", "A block", "--max-tokens", "900"]
    )
    flags += [] if command == "bench" else ["--temperature", "0"]
    process = run("-m", "quire.cli", command, *FLAGS, "--max-model-len", "2000", *flags)
    assert process.stderr is not None and process.stdout is not None
    try:
        while line := process.stderr.readline():
            if b"ready" in line:
                break
        if command == "generate":
            assert process.stdout.read(1)
        else:
            time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
        assert errors.decode().strip() == f"quire {command}: interrupted"
        assert process.returncode == 130
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("quire.cli", ""),
        ("quire.commands.table", ""),
        ("msgspec", ""),
        ("importlib.metadata", "quire --version: interrupted"),
        ("exit", ""),
    ],
)
def test_a_command_that_is_interrupted_at_its_start_or_end_shows_no_traceback(where: str, said: str) -> None:
    process = run("-c", textwrap.dedent(INTERRUPTED), where, "--version")
    _, errors = process.communicate(timeout=SECONDS)
    assert (errors.decode().strip(), process.returncode) == (said, 130)


def test_an_llm_shows_how_it_starts_on_a_terminal() -> None:
    program = "from quire.llm import LLM; LLM(device='cpu', num_gpu_blocks_override=8, swap_space=0)"
    ours, theirs = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
        stderr=theirs,
        check=True,
        timeout=SECONDS,
    )
    assert b"ready" in os.read(ours, 1 << 16)
    os.close(ours)
    os.close(theirs)
