"""Runs `kvloft serve` for the engines of a test, and replaces embedded stores with servers.

`KV_STORE=server pytest tests/e2e` replaces the store of each engine with a server that has the same
settings and lifetime. If the engine shuts down, the server also shuts down. If the engine is killed
with SIGKILL, so is the server. This module must not import vLLM.
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
from kvloft.config.table import OF_STORE
from kvloft.errors import StoreError

PACE = float(os.environ.get("TEST_PACE", "1"))
IS_SERVED = os.environ.get("KV_STORE") == "server"
"""True if every engine uses a server instead of an embedded store."""
of_own_store = pytest.mark.skipif(
    IS_SERVED, reason="tests an embedded store, but KV_STORE=server replaces it"
)


class CacheServer:
    """A `kvloft serve` process, started as users start it.

    ``end`` sends SIGKILL by default. ``start`` starts the server again with the same disk
    directory.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kv-"))  # a socket path must be short
        self.socket = self.folder / "run" / "kvloft.sock"
        self.log = self.folder / "log"
        self.disk: dict[str, Any] = {"disk_path": self.folder / "disk", "disk_size": "256MiB"}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, host_size: str = "64MiB") -> "CacheServer":
        """Start the server with a disk tier under ``folder``."""
        return self.serve({"host_size": host_size} | self.disk)

    def serve(self, settings: Mapping[str, Any]) -> "CacheServer":
        options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvloft.cli", "serve", f"--socket={self.socket}", *options],
                stdout=log,
                stderr=log,
            )
        until(self._is_up, "the server does not respond")
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
        """Send SIGSTOP and wait until every thread is stopped."""
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
        """Send the signal, wait until the server exits, and return the exit status."""
        if self._process is None:
            return 0
        self.send(number)
        process, self._process = self._process, None
        sent = time.monotonic()
        until(lambda: has_ended(process, sent), "the server does not exit")
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

        until(is_at_rest, "chunks are still pinned or reserved")

    def close(self) -> None:
        self.end()
        shutil.rmtree(self.folder)


def has_ended(process: subprocess.Popen[bytes], sent: float) -> bool:
    """Return True if the process has exited, except for threads that a frozen file system blocks.

    Other threads exit shortly after the main thread and hold the socket's lock until then, so this
    function returns False for a few seconds after the main thread exits.
    """
    if process.poll() is not None:
        return True
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0]
    if state in "ZX" and time.monotonic() - sent > 5 * PACE:
        _ending.append(process)
        return True
    return False


_ending: list[subprocess.Popen[bytes]] = []
"""Servers that may still be exiting. The references are kept so that the servers are reaped."""


def until(is_so: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 60 * PACE
    while not is_so():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def instead(transfer: Any, servers: list[CacheServer]) -> Any:
    """Return vLLM's kv_transfer_config with each embedded store replaced by a server.

    The servers are added to ``servers``.
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
    """Send signal ``number`` to an exited engine's servers, and delete the servers' files."""
    while servers:
        server = servers.pop()
        server.end(number)
        server.close()


def argv_instead(argv: list[str], servers: list[CacheServer]) -> list[str]:
    """Do the same as `instead`, but for a vLLM command line."""
    if "--kv-transfer-config" not in argv:
        return argv
    at = argv.index("--kv-transfer-config") + 1
    return [*argv[:at], json.dumps(instead(json.loads(argv[at]), servers)), *argv[at + 1 :]]
