"""GPUs as Ray counts them: those of a replica are one placement group, and who finds none waits for them.

There are none here. Ray gives away what it was told that there is, and the ranks run on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from ray import serve
from ray.util import placement_group_table

from quire.ray import app
from tests.ray.serving import (
    NAME,
    REPLICA,
    SECONDS,
    children_of,
    deployment,
    pid_at,
    run,
    running_replicas,
    stream,
)
from tests.waiting import until


@pytest.fixture(scope="module", autouse=True)
def three_replicas_where_two_fit(url: str) -> Iterator[None]:
    three = {"tensor_parallel_size": "2", "num_gpus": "2", "min_replicas": "3"}
    target = serve.RunTarget(app({**REPLICA, **three}), name=NAME)
    serve.run_many([target], wait_for_applications_running=False)
    until(lambda: running_replicas() == 2, "two replicas are there", SECONDS)
    yield
    serve.delete(NAME)


async def replicas(session: aiohttp.ClientSession, url: str) -> set[str]:
    """Return those that answer some requests, which have nothing in common."""
    prompts = [f"{turn} " + "blocks are shared " * 20 for turn in range(4)]
    answers = [await stream(session, url, max_tokens=4, prompt=prompt) for prompt in prompts]
    assert all(ends == ["done"] for _, _, ends in answers)
    return {replica for replica, _, _ in answers}


def visible_gpus(pid: int) -> set[str]:
    """Return what CUDA would let the processes see that this one has started."""
    environments = [Path(f"/proc/{child}/environ").read_text().split("\0") for child in children_of(pid)]
    name = "CUDA_VISIBLE_DEVICES="
    return {entry.removeprefix(name) for each in environments for entry in each if entry.startswith(name)}


def test_a_replicas_ranks_have_one_placement_group_and_see_its_gpus(url: str) -> None:
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    assert [group["bundles"] for group in groups] == [{0: {"CPU": 1.0, "GPU": 2.0}}] * 2

    async def work(session: aiohttp.ClientSession) -> None:
        there = await replicas(session, url)
        assert [visible_gpus(pid_at(replica)) for replica in there] == [{"0,1"}] * 2  # on two nodes

    run(work)


def test_a_replica_that_finds_no_room_says_what_it_waits_for_and_the_others_answer(url: str) -> None:
    until(lambda: "1 replicas that have taken more than" in deployment().message, "Ray says that one waits")
    assert '"GPU": 2' in deployment().message
    assert deployment().replica_states == {"RUNNING": 2, "STARTING": 1}

    async def work(session: aiohttp.ClientSession) -> None:
        assert len(await replicas(session, url)) == 2

    run(work)
