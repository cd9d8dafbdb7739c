"""Publishes KV events by ZeroMQ as vLLM does, from a thread of its own, so that the engine never waits."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import msgspec
import zmq

from quire.engine.config import KVEventsConfig
from quire.engine.core import EngineCore
from quire.engine.registry.kv_events import Event, KVEventBatch, KVEventLog, sources_of

logger = logging.getLogger("quire.kv_events")

TICK_MS = 20  # for which changes gather
END = (-1).to_bytes(8, "big", signed=True)  # the sequence number after the last batch of a replay
LINGER_MS = 1000  # for which the last batches may take to leave at the end


class KVEventPublisher:
    """Sends each batch as (topic, sequence number in 8 bytes, payload).

    Who missed some asks the replay socket for all from a number on. Where these are not kept any more, the
    answer is one batch under the newest number that clears all blocks and stores those that there are.
    """

    def __init__(self, config: KVEventsConfig, log: KVEventLog) -> None:
        """Raises ValueError if an endpoint cannot be had."""
        self._log = log
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0  # the next batch's number
        self._stopped = threading.Event()
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.set_hwm(config.hwm)
        self._replay = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        try:
            if "*" in config.endpoint or "::" in config.endpoint or not config.endpoint.startswith("tcp://"):
                self._events.bind(config.endpoint)
            else:
                self._events.connect(config.endpoint)
            if config.replay_endpoint is not None:
                self._replay.bind(config.replay_endpoint)
                self._poller.register(self._replay, zmq.POLLIN)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            where = f"{config.endpoint!r} or {config.replay_endpoint!r}"
            raise ValueError(f"--kv-events-config: {where} cannot be had: {error}; choose others") from error
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Publish what is left and close the sockets."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._context.destroy(linger=LINGER_MS)

    def _run(self) -> None:
        while not self._stopped.is_set():
            # Without a replay socket nothing is registered, and polling is waiting.
            asked = self._poller.poll(TICK_MS)
            try:
                self.publish()
                if asked:
                    self._answer(self._replay.recv_multipart())
            except Exception:  # a bug, or a malformed question: neither may end publishing for good
                logger.exception("a batch of KV events was not published")
                time.sleep(TICK_MS / 1000)
        self.publish()

    def publish(self) -> None:
        """Send what has changed as one batch."""
        events = self._log.take()
        if events:
            payload = _encode(events)
            self._kept.append((self._next, payload))
            self._events.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload))
            self._next += 1

    def _answer(self, question: list[bytes]) -> None:
        """Replay the batches from the number on that `question` [identity, "", number] ends with."""
        if len(question) != 3 or len(question[2]) != 8:
            logger.warning("a replay is asked for by an 8-byte number, got %r", question[1:])
            return
        identity, first = question[0], int.from_bytes(question[2], "big")
        batches = [(number, payload) for number, payload in self._kept if number >= first]
        kept_from = self._kept[0][0] if self._kept else self._next
        if first < kept_from:
            batches = [(self._next - 1, _encode(self._log.everything()))]
        for number, payload in batches:
            self._replay.send_multipart((identity, b"", number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((identity, b"", END, b""))


def start_kv_events(config: KVEventsConfig, block_size: int, core: EngineCore) -> KVEventPublisher:
    """Publish what `core` can find from now on. Raises ValueError if an endpoint cannot be had."""
    state = core.scheduler.state
    sources = sources_of(state.blocks, state.capacity.max_model_len)
    log = KVEventLog(sources, block_size, config.max_queue_size)
    publisher = KVEventPublisher(config, log)
    publisher.start()
    return publisher


def _encode(events: list[Event]) -> bytes:
    return msgspec.msgpack.encode(KVEventBatch(time.time(), events, 0))
