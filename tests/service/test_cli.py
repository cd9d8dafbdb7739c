"""Flags that would do nothing are refused, with the one that they need."""

import pytest

from service.cli import main


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (["serve", "--advertise-url", "http://10.0.0.7:8000"], "--advertise-url"),
        (["serve", "--registry-lease", "5"], "--registry-lease"),
        (["route", "--replica", "http://10.0.0.7:8000", "--cache-seed", "secret"], "--cache-seed"),
    ],
)
def test_what_is_of_the_registry_needs_one(command: list[str], flag: str) -> None:
    with pytest.raises(SystemExit, match=f"{flag} .*give --redis-url too"):
        main(command)
