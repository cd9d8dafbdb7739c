"""Attacks that would cost a server more than they cost who sends them. Each raises Harm if it is so."""

from __future__ import annotations

import contextlib
import json
import socket
import time

from quire.loadtest.chaos.attacks import STRANGER, Attack, Attacker, answer, expect, expect_refusal

FLOOD = (
    16 << 20
)  # bytes of trailers; the system's own buffers hold some MiB of them for a server that is late
SLOTS = 5
LONG_PROMPT = 3 << 20  # bytes
MANY_PROMPTS, PROMPT_CHARS = 300, 2048
MEGABYTES = 2 << 20  # of each of some bodies at once
BODIES = 6
LONG_ID = 4000  # characters
PIPELINED = 400
SAMPLES, LOGPROBS = 8, 20
WORDS = "the server keeps a block of the cache for each request that it runs and counts who holds it "


def status_of(connection: socket.socket) -> int:
    """Return the status of the answer that begins; 0 if the server closes, or says nothing in time."""
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        first = connection.recv(4096)
        if first.startswith(b"HTTP/1.1 "):
            return int(first.split(b" ", 2)[1])
    return 0


def floods_trailers(attacker: Attacker) -> None:
    connection = attacker.send(STRANGER + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
    connection.settimeout(2)
    line = b"X-Trailer: " + b"x" * 4000 + b"\r\n"
    with contextlib.suppress(ConnectionResetError, BrokenPipeError, TimeoutError):
        for _ in range(FLOOD // len(line)):
            connection.sendall(line)
        expect(False, f"{FLOOD >> 20} MiB of trailers were taken")


def authorises_in_a_trailer(attacker: Attacker) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    data = b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, attacker.authorization)
    connection = attacker.send(STRANGER + b"Transfer-Encoding: chunked\r\n\r\n" + data)
    expect(status_of(connection) in (400, 401), "a key in a trailer was not refused")


def names_itself_twice(attacker: Attacker) -> None:
    twice = b"Authorization: Bearer wrong\r\n" + attacker.authorization
    connection = attacker.send(STRANGER + twice + b"Content-Length: 2\r\n\r\n{}")
    expect(status_of(connection) in (400, 401), "the second of two keys was taken")
    host = attacker.head.replace(b"Host: localhost", b"Host: elsewhere\r\nHost: localhost")
    connection = attacker.send(host + b'Content-Length: 13\r\n\r\n{"prompt": 1}')
    expect(status_of(connection) == 400, "two hosts were taken")


def holds_slots(attacker: Attacker) -> None:
    """Get an answer on each connection, and send one byte of a body that nobody waits for."""
    held = []
    for _ in range(SLOTS):
        connection = attacker.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
        status_of(connection)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(b"x")
        held.append(connection)
    until = time.monotonic() + attacker.patience
    for connection in held:
        connection.settimeout(max(until - time.monotonic(), 0.1))
        answer(connection)


def sends_a_long_prompt(attacker: Attacker) -> None:
    text = WORDS * (LONG_PROMPT // len(WORDS))
    expect_refusal(attacker.ask(json.dumps({"prompt": text, "max_tokens": 1}).encode()), b"4")


def sends_many_prompts(attacker: Attacker) -> None:
    prompts = [f"{at} {WORDS * 30}"[:PROMPT_CHARS] for at in range(MANY_PROMPTS)]
    expect_refusal(attacker.ask(json.dumps({"prompt": prompts, "max_tokens": 1}).encode()), b"4")


def sends_large_bodies_at_once(attacker: Attacker) -> None:
    body = json.dumps({"prompt": WORDS * (MEGABYTES // len(WORDS)), "max_tokens": 1}).encode()
    sent = [attacker.ask(body) for _ in range(BODIES)]
    for connection in sent:  # 502: the replica that had it was killed
        status = status_of(connection)
        expect(400 <= status <= 503, f"a large body got {status}")


def chooses_long_stream_ids(attacker: Attacker) -> None:
    body = b'{"prompt": "a", "max_tokens": 1, "stream": true}'
    rest = b"X-Stream-Id: %b\r\nContent-Length: %d\r\n\r\n%b" % (b"i" * LONG_ID, len(body), body)
    for _ in range(20):
        connection = attacker.send(STRANGER + rest)
        expect(status_of(connection) == 401, "a stream of one without a key was not refused")
        connection.close()
    expect_refusal(attacker.send(attacker.head + rest), b"400")


def asks_for_options(attacker: Attacker) -> None:
    request = b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n" + attacker.authorization + b"\r\n"
    expect(400 <= status_of(attacker.send(request)) < 500, "OPTIONS * is no client's error")


def asks_for_all_logprobs(attacker: Attacker) -> None:
    sampling = {"n": SAMPLES, "temperature": 1.0, "max_tokens": 1, "prompt_logprobs": LOGPROBS}
    body = {"prompt": WORDS * 8, **sampling}
    status = status_of(attacker.ask(json.dumps(body).encode()))
    # 502: the replica that had it was killed
    expect(status in (200, 400, 502), f"it was neither done nor refused, but got {status}")


def reads_nothing(attacker: Attacker) -> None:
    """Ask for more than the system's buffers hold, and do not take it for as long as a server waits."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with connection:
        connection.settimeout(attacker.patience)
        connection.connect(("127.0.0.1", attacker.port))
        get = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(get * PIPELINED)
            time.sleep(attacker.patience)
            connection.sendall(b"\r\n")  # which a server that is gone answers with a reset
            time.sleep(1)
            connection.sendall(b"\r\n")
            expect(False, "a client that read nothing was not cut")


# Those of the second list take as long as a server waits for a client.
COSTLY: list[Attack] = [
    floods_trailers,
    authorises_in_a_trailer,
    names_itself_twice,
    sends_a_long_prompt,
    sends_many_prompts,
    sends_large_bodies_at_once,
    chooses_long_stream_ids,
    asks_for_options,
    asks_for_all_logprobs,
]
PATIENT: list[Attack] = [holds_slots, reads_nothing]
