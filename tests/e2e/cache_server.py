"""`kvloft serve` with the engines of a test, and the same tests with a server instead of each
engine's own store.

`KV_STORE=server pytest tests/e2e` replaces the store of each engine with a server. It has the
store's settings and lifetime: it shuts down when its engine does, and is killed with kill -9 when
its engine is. Must not depend on vLLM.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvloft._core import server_status
from kvloft.config import OF_STORE
from kvloft.errors import StoreError

PACE = float(os.environ.get("TEST_PACE", "1"))
IS_SERVED = os.environ.get("KV_STORE") == "server"
"""The switch."""
of_own_store = pytest.mark.skipif(
    IS_SERVED, reason="tests an embedded store, which is a server here"
)


class CacheServer:
    """`kvloft serve` as users run it. ``kill`` is kill -9; ``start`` starts it again with the same
    disk.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kv-"))  # a socket's path is short
        self.socket = self.folder / "run" / "kvloft.sock"
        self.log = self.folder / "log"
        self.disk: dict[str, Any] = {"disk_path": self.folder / "disk", "disk_size": "256MiB"}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, host_size: str = "64MiB") -> "CacheServer":
        """With a disk tier in its folder."""
        return self.serve({"host_size": host_size} | self.disk)

    def serve(self, settings: Mapping[str, Any]) -> "CacheServer":
        """With other settings of a store."""
        options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvloft.cli", "serve", f"--socket={self.socket}", *options],
                stdout=log,
                stderr=log,
            )
        until(self._is_up, "the server does not answer")
        return self

    def _is_up(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.log.read_text()[
            -3000:
        ]
        return self._answers()

    def _answers(self) -> bool:
        try:
            server_status(str(self.socket))
        except StoreError:
            return False
        return True

    def status(self) -> dict[str, Any]:
        return server_status(str(self.socket))

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def freeze(self) -> None:
        """SIGSTOP, and wait until every thread is stopped."""
        self.send(signal.SIGSTOP)
        assert self._process is not None
        tasks = Path(f"/proc/{self._process.pid}/task")
        until(
            lambda: all(
                (t / "stat").read_text().rpartition(") ")[2][0] == "T" for t in tasks.iterdir()
            ),
            "the server does not stop",
        )

    def end(self, number: int = signal.SIGKILL) -> int:
        """Send the signal and wait; returns the exit status."""
        if self._process is None:
            return 0
        self.send(number)
        process, self._process = self._process, None
        sent = time.monotonic()
        until(lambda: has_ended(process, sent), "the server does not end")
        return process.returncode if process.returncode is not None else 0

    def namespaces(self) -> list[dict[str, Any]]:
        spaces: list[dict[str, Any]] = self.status()["namespaces"]
        return spaces

    def assert_at_rest(self) -> None:
        def is_at_rest() -> bool:
            status = self.status()
            held = [
                space["stats"][name]
                for space in status["namespaces"]
                for name in ("frames_reserved", "pins")
            ]
            return not any(held) and status["stats"]["quarantined_leases"] == 0

        until(is_at_rest, "something is held")

    def close(self) -> None:
        self.end()
        shutil.rmtree(self.folder)


def has_ended(process: subprocess.Popen[bytes], sent: float) -> bool:
    """True if the process waits only for threads that hang in a frozen file system: its first
    thread has returned.

    Other threads end a moment later and hold the socket's lock until then, so this waits for
    them.
    """
    if process.poll() is not None:
        return True
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0]
    if state in "ZX" and time.monotonic() - sent > 5 * PACE:
        _ending.append(process)
        return True
    return False


_ending: list[subprocess.Popen[bytes]] = []
"""Kept until this process ends, so that they are reaped."""


def until(is_so: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 60 * PACE
    while not is_so():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def instead(transfer: Any, servers: list[CacheServer]) -> Any:
    """vLLM's kv_transfer_config with a server for each requested store; servers are added to
    ``servers``.
    """
    if not isinstance(transfer, dict):
        return transfer
    extra = transfer.get("kv_connector_extra_config") or {}
    if children := extra.get("connectors"):
        return transfer | {
            "kv_connector_extra_config": extra
            | {"connectors": [instead(child, servers) for child in children]}
        }
    if transfer.get("kv_connector") != "KVLoftConnector" or "server" in extra:
        return transfer
    servers.append(CacheServer())
    servers[-1].serve({name: extra[name] for name in OF_STORE if name in extra})
    kept = {name: value for name, value in extra.items() if name not in OF_STORE}
    served = {"server": f"unix:{servers[-1].socket}", "server_timeout": f"{10 * PACE}s"}
    return transfer | {"kv_connector_extra_config": kept | served}


def end(servers: list[CacheServer], number: int) -> None:
    """Its server ends with its engine."""
    while servers:
        server = servers.pop()
        server.end(number)
        server.close()


def argv_instead(argv: list[str], servers: list[CacheServer]) -> list[str]:
    """The same for a vLLM command line."""
    if "--kv-transfer-config" not in argv:
        return argv
    at = argv.index("--kv-transfer-config") + 1
    return [*argv[:at], json.dumps(instead(json.loads(argv[at]), servers)), *argv[at + 1 :]]
