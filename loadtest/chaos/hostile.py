"""Hostile clients beside the traffic: each attack again and again."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from quire.loadtest.chaos.attacks import (
    ATTACKS,
    Attack,
    Attacker,
    Harm,
    holds_five_hundred_idle_connections,
    says_nothing,
    trickles_its_body,
    trickles_its_headers,
)
from quire.loadtest.chaos.costly import COSTLY, PATIENT
from quire.loadtest.chaos.fleet import KEY
from quire.service.config import ServiceConfig

PATIENCE = 42.0  # seconds: a server waits 30 for a client, and may have begun late
PAUSE = 0.3  # seconds between two attacks that are quick, on the same server
LIMITS = ServiceConfig(served_model_names=("any",))

SLOW = [says_nothing, trickles_its_headers, trickles_its_body, *PATIENT]
IDLE = holds_five_hundred_idle_connections
QUICK = [attack for attack in (*ATTACKS, *COSTLY) if attack not in (*SLOW, IDLE)]
NAMES = [attack.__name__ for attack in (*QUICK, *SLOW, IDLE)]


@dataclass
class Harms:
    """A count of how often each attack was made, and what came of those that were not stood."""

    made: dict[str, int] = field(default_factory=dict)
    stood: dict[str, int] = field(default_factory=dict)
    harms: dict[str, str] = field(default_factory=dict)  # by attack: the first

    def note(self, name: str, harm: str | None) -> None:
        self.made[name] = self.made.get(name, 0) + 1
        if harm is None:
            self.stood[name] = self.stood.get(name, 0) + 1
        else:
            self.harms.setdefault(name, harm)


class HostileClients:
    """Threads, as attacks wait for their sockets; `ports`: by the servers' names."""

    def __init__(self, ports: Mapping[str, int], names: Sequence[str], seed: int) -> None:
        self.found = Harms()
        self._ports = ports
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._quick = quick = [attack for attack in QUICK if attack.__name__ in names]
        works: list[tuple[Callable[..., None], tuple[object, ...]]] = [
            (self._repeat, (attack, name)) for attack in SLOW if attack.__name__ in names for name in ports
        ]
        works += [(self._mix, (quick, name, seed)) for name in ports if quick]
        works += [(self._idle, (name,)) for name in ports if IDLE.__name__ in names]
        self._threads = [threading.Thread(target=work, args=arguments) for work, arguments in works]

    def run(self, seconds: float) -> None:
        """Attack for so long. No attack begins after that, and those that have begun end."""
        for thread in self._threads:
            thread.start()
        self._over.wait(seconds)
        self._over.set()
        for thread in self._threads:
            thread.join()

    def run_once(self) -> None:
        """Make each quick attack once on each server."""

        def make_all(name: str) -> None:
            for attack in self._quick:
                self._make(attack, name)

        with ThreadPoolExecutor(len(self._ports)) as threads:
            list(threads.map(make_all, self._ports))

    def _repeat(self, attack: Attack, name: str) -> None:
        while not self._over.is_set():
            self._make(attack, name)

    def _mix(self, attacks: list[Attack], name: str, seed: int) -> None:
        """Make all of the attacks, in another order each time."""
        rng = random.Random(f"{seed} {name}")
        while True:
            for attack in rng.sample(attacks, len(attacks)):
                if self._over.wait(PAUSE):
                    return
                self._make(attack, name)

    def _make(self, attack: Attack, name: str) -> None:
        attacker = self._attacker(name)
        harm = None
        begin = time.monotonic()
        with attacker.sockets:
            try:
                attack(attacker)
            except Harm as found:
                harm = f"{name}: {found}"
            except OSError as error:
                harm = f"{name}: after {time.monotonic() - begin:.1f} s {error or type(error).__name__}"
        with self._lock:
            self.found.note(attack.__name__, harm)

    def _idle(self, name: str) -> None:
        """Hold connections all the while, or for as long as the server lets them."""
        attacker = self._attacker(name)
        with attacker.sockets:
            with contextlib.suppress(OSError):
                IDLE(attacker)
            self._over.wait()
        with self._lock:
            self.found.note(IDLE.__name__, None)

    def _attacker(self, name: str) -> Attacker:
        limits = (LIMITS.max_header_bytes, LIMITS.max_body_bytes)
        return Attacker(self._ports[name], *limits, patience=PATIENCE, key=KEY)


def attack(ports: Mapping[str, int], names: Sequence[str], seed: int, seconds: float) -> Harms:
    """Attack from a process of its own: what the attacks cost is not taken from the other clients."""
    clients = HostileClients(ports, names, seed)
    clients.run(seconds)
    return clients.found
