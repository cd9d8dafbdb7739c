"""Where no registry says what replicas hold, prompts go where their prefix was sent."""

from __future__ import annotations

from quire.ray.affinity import PrefixAffinity
from quire.service.router.prompt import Prompt

A, B = "http://10.0.0.1:1", "http://10.0.0.2:1"
SHARED = list(range(64))


def prompt(tail: int, salt: str = "") -> Prompt:
    """Four blocks that all of a tenant's prompts share, and one of its own."""
    return Prompt(SHARED + [tail] * 16, salt, whole=True)


def sent(affinity: PrefixAffinity, url: str, what: Prompt) -> None:
    affinity.add(url, affinity.locate(what).prefixes[""])


def two(blocks: int = 100) -> PrefixAffinity:
    affinity = PrefixAffinity(16)
    affinity.follow({A: blocks, B: blocks})
    return affinity


def test_a_prefix_is_where_a_prompt_that_begins_so_was_sent() -> None:
    affinity = two()
    sent(affinity, A, prompt(1))
    assert affinity.locate(prompt(2)).held == {A: 4, B: 0}
    assert affinity.locate(prompt(1)).held == {A: 5, B: 0}


def test_tenants_do_not_share_theirs() -> None:
    affinity = two()
    sent(affinity, A, prompt(1, "alice"))
    assert affinity.locate(prompt(2, "bob")).held == {A: 0, B: 0}


def test_what_there_is_no_more_room_for_is_gone_and_ends_go_before_beginnings() -> None:
    affinity = two(blocks=6)
    sent(affinity, A, prompt(1, "alice"))
    sent(affinity, A, prompt(1, "bob"))
    assert affinity.locate(prompt(1, "bob")).held == {A: 5, B: 0}
    assert affinity.locate(prompt(1, "alice")).held == {A: 1, B: 0}


def test_a_replica_that_is_gone_takes_its_prefixes_along() -> None:
    affinity = two()
    sent(affinity, A, prompt(1))
    affinity.follow({B: 100})
    affinity.follow({A: 100, B: 100})
    assert affinity.locate(prompt(1)).held == {A: 0, B: 0}
    sent(affinity, "http://10.0.0.9:1", prompt(1))  # Ray has told of its end in the meantime
