"""The arguments of an application on Ray: what `quire serve` takes, and how many replicas there are."""

from __future__ import annotations

import pytest

from quire.ray.settings import read_arguments, settings_at


def test_they_are_the_flags_of_serve_as_texts_or_as_values() -> None:
    texts = read_arguments(
        {"device": "cpu", "max_num_seqs": "8", "enforce_eager": "true", "max_replicas": "3"}
    )
    values = read_arguments({"device": "cpu", "max_num_seqs": 8, "enforce_eager": True, "max_replicas": 3})
    assert texts == values
    assert texts.arguments.max_num_seqs == 8
    assert texts.arguments.enforce_eager
    assert (texts.min_replicas, texts.max_replicas) == (1, 3)
    assert (texts.max_ongoing_requests, texts.target_ongoing_requests) == (8, 4)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"max_num_seq": 8}, "did you mean max_num_seqs?"),
        ({"enable_lora": True}, "adapters that requests choose among are not there yet"),
        ({"max_num_seqs": "many"}, "max_num_seqs must be a whole number"),
        ({"port": 8000}, "Ray's proxy listens"),
        ({"advertise_url": "http://a"}, "leave it out"),
        ({"min_replicas": 3, "max_replicas": 0, "target_ongoing_requests": 1000}, "target_ongoing_requests"),
        ({"min_replicas": 0}, "min_replicas must be at least 1"),
        ({"downscale_delay_s": -1}, "downscale_delay_s must be at least 0"),
        ({"look_back_period_s": 0}, "look_back_period_s must be above 0"),
        ({"device": "cuda", "tensor_parallel_size": 2, "num_gpus": 1}, "num_gpus must be at least tensor_p"),
        ({"redis_url": "http://a"}, "--redis-url"),
    ],
)
def test_what_is_wrong_is_refused_by_name(entries: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("?", r"\?")):
        read_arguments(entries)


def test_a_replica_has_an_address_and_gpus_of_its_own() -> None:
    settings = read_arguments({"tensor_parallel_size": 4, "redis_url": "redis://10.0.0.9"})
    assert settings.num_gpus == 4
    assert read_arguments({"device": "cpu"}).num_gpus == 0
    assert read_arguments({"device": "cpu", "num_gpus": "2"}).num_gpus == 2
    own = settings_at(settings.arguments, "10.0.0.7", 4711)
    assert own.registry is not None
    assert own.registry.advertise_url == "http://10.0.0.7:4711"
    assert (own.service.host, own.service.port) == ("10.0.0.7", 4711)
