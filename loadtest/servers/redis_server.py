"""A real Redis that can be stopped, killed and started again."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import redis

from quire.loadtest.servers.server_process import free_port


class RedisServer:
    """On one port for its life. `client` waits for as long as it takes, unlike those of the registry."""

    def __init__(self, folder: Path, *options: str, tls: bool = False) -> None:
        """Describe a server that, with `tls`, speaks TLS on `tls_port` too."""
        self.port, self.tls_port = free_port(), free_port()
        if tls:
            options += ("--tls-port", str(self.tls_port), "--tls-auth-clients", "no")
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis(port=self.port)
        self._options = options
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it empty: nothing is ever written to disk."""
        place = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command = ["redis-server", *place, "--save", "", "--appendonly", "no", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"redis-server ended with exit code {self._process.returncode}")
            with contextlib.suppress(redis.ConnectionError):
                if self.client.ping():
                    return
            time.sleep(0.02)

    def count_blocks(self, replica: str) -> int:
        """Return how many blocks of a replica the registry holds."""
        return sum(int(self.client.scard(key)) for key in self.client.keys(f"quire:*:blocks:{replica}:*"))

    def is_whole(self, replica: str) -> bool:
        """Say whether the registry knows a replica, and holds all of it as far as it knows."""
        keys = self.client.keys(f"quire:*:meta:{replica}")
        return any(self.client.hget(key, "whole") == b"1" for key in keys)

    def cpu_seconds(self) -> float:
        """Return the CPU time of the one thread that reads, executes and answers commands."""
        spent: Any = self.client.info("cpu")
        return float(spent["used_cpu_user_main_thread"]) + float(spent["used_cpu_sys_main_thread"])

    def used_bytes(self) -> int:
        memory: Any = self.client.info("memory")
        return int(memory["used_memory"])

    def pause(self) -> None:
        """Let it take connections and bytes, and answer nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self.client.close()
