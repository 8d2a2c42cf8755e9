"""Connector settings, environments and servers for the external caches that the benches compare.

This module imports neither vLLM nor any of these caches, so that a cache that fails to import does
not prevent measuring the others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LMCACHE_PORT = 50056
CONNECTORS: dict[str, dict[str, Any]] = {
    "lmcache": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
    "lmcache-server": {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_connector_extra_config": {"lmcache.mp.port": LMCACHE_PORT},
    },
    "pegaflow": {
        "kv_connector": "PegaKVConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "pegaflow.connector",
    },
}
NAMES = tuple(CONNECTORS)
PACKAGES = {name: name.removesuffix("-server") for name in NAMES}
PEGAFLOW_PORT, PEGAFLOW_HTTP = 50055, "http://127.0.0.1:9091"
LMCACHE_READY = "LMCache cache server is running"
READY_S, STOP_S = 90.0, 10.0
BEFORE = "BENCH_BEFORE"
"""Environment variable that contains the PYTHONPATH of the kvloft version to compare with."""
SERVED = ("served", "served2")
"""Engines that share one `kvloft serve`."""


def env_of(name: str, host_gib: int) -> dict[str, str]:
    """Return extra environment variables for the engine with connector ``name``."""
    if name == "lmcache-server":
        return {"LMCACHE_TRACK_USAGE": "false"}
    if name == "lmcache":
        return {
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": str(host_gib),
            "LMCACHE_CHUNK_SIZE": "256",
        }
    if name == "before":
        return {
            "PYTHONPATH": ":".join(filter(None, (os.environ[BEFORE], os.environ.get("PYTHONPATH"))))
        }
    if name == "pegaflow":
        return {"PEGAFLOW_HOST": "http://127.0.0.1", "PEGAFLOW_PORT": str(PEGAFLOW_PORT)}
    return {}


@contextmanager
def daemons(
    names: Iterable[str], host_gib: int, log_of: Callable[[str], Path]
) -> Iterator[dict[str, str]]:
    """Run the PegaFlow and LMCache servers that the connectors ``names`` require.

    Yields a dict with the reason for each server that did not become ready. ``log_of(name)`` is a
    server's log file.
    """
    started: dict[str, subprocess.Popen[bytes]] = {}
    errors: dict[str, str] = {}
    try:
        for name in SERVERS.keys() & set(names):
            with _errors_to(errors, name), log_of(name).open("w") as file:
                command, env = SERVERS[name](host_gib)
                started[name] = subprocess.Popen(
                    command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
        for name, server in started.items():
            with _errors_to(errors, name):
                _wait_ready(server, log_of(name), PEGAFLOW_HTTP if name == "pegaflow" else None)
        yield errors
    finally:
        for server in started.values():
            _stop(server)


@contextmanager
def _errors_to(errors: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        errors[name] = str(error)


def _pegaflow(host_gib: int) -> tuple[list[str], Mapping[str, str]]:
    """Return PegaFlow's server command and environment.

    The server is linked against libpython and the CUDA runtime. Their directories come from the
    pegaflow package and the environment.
    """
    package = find_spec("pegaflow")
    torch = find_spec("torch")
    if package is None or package.origin is None or torch is None or torch.origin is None:
        raise RuntimeError("pegaflow or torch cannot be imported")
    folder, site = Path(package.origin).parent, Path(torch.origin).parents[1]
    home, server = folder.parent / "pyhome", folder / "pegaflow-server-py"
    with suppress(OSError):
        server.chmod(0o755)
    found = [list(site.glob(f"nvidia/*/lib/{name}.so.13*")) for name in ("libcudart", "libnvrtc")]
    libraries = [
        str(home / "lib"),
        *(str(paths[0].parent) for paths in found if paths),
        str(home / "fallback"),
    ]
    old = os.environ.get("LD_LIBRARY_PATH", "")
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join([*libraries, *filter(None, [old])]),
        "PYTHONHOME": str(home),
        "PYTHONPATH": f"{folder.parent}:{site}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [
        str(server),
        "--addr",
        f"127.0.0.1:{PEGAFLOW_PORT}",
        "--http-addr",
        PEGAFLOW_HTTP.removeprefix("http://"),
        "--devices",
        "0",
        "--pool-size",
        f"{host_gib}gb",
        "--trace-sample-rate",
        "0",
    ]
    return command, env


def _lmcache(host_gib: int) -> tuple[list[str], Mapping[str, str]]:
    """Return LMCache's multi-process server command and environment.

    The server allocates all of its memory at startup, like kvloft's server.
    """
    command = [
        sys.executable,
        "-m",
        "lmcache.v1.multiprocess.server",
        "--host",
        "127.0.0.1",
        "--port",
        str(LMCACHE_PORT),
        "--l1-size-gb",
        str(host_gib),
        "--no-l1-use-lazy",
        "--eviction-policy",
        "LRU",
        "--chunk-size",
        "256",
    ]
    return command, {
        **os.environ,
        **env_of("lmcache-server", host_gib),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


SERVERS: dict[str, Callable[[int], tuple[list[str], Mapping[str, str]]]] = {
    "pegaflow": _pegaflow,
    "lmcache-server": _lmcache,
}


@contextmanager
def kvloft_server(names: Iterable[str], host_bytes: int, log: Path) -> Iterator[str | None]:
    """Run `kvloft serve` and yield its socket, or yield None if no engine in ``names`` uses it.

    Raises RuntimeError if the server does not become ready.
    """
    if not set(SERVED) & set(names):
        yield None
        return
    with tempfile.TemporaryDirectory() as folder, log.open("w") as file:
        socket = Path(folder) / "kvloft.sock"
        command = [
            sys.executable,
            "-m",
            "kvloft.cli",
            "serve",
            "--socket",
            str(socket),
            "--host-size",
            str(host_bytes),
        ]
        server = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + READY_S
            while not socket.exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        "kvloft serve did not become ready: "
                        f"{log.read_text(errors='replace')[-1000:]}"
                    )
                time.sleep(0.05)
            yield str(socket)
        finally:
            _stop(server)


def _wait_ready(server: subprocess.Popen[bytes], log: Path, http: str | None) -> None:
    """Wait until the server is ready, according to ``http`` or, if that is None, its log."""
    deadline = time.monotonic() + READY_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(urllib.error.URLError, OSError):
            if http is not None:
                opener.open(f"{http}/health", timeout=2.0).close()
                return
            if LMCACHE_READY in log.read_text(errors="replace"):
                return
        time.sleep(0.25)
    raise RuntimeError(
        f"the server did not become ready: {log.read_text(errors='replace')[-1000:]}"
    )


def _stop(server: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            server.wait(STOP_S)
            return


def is_installed(name: str) -> bool:
    """Return True if the connector ``name`` is available.

    A peer requires its package, and "before" requires the environment variable BENCH_BEFORE.
    """
    if name == "before":
        return BEFORE in os.environ
    return name not in CONNECTORS or find_spec(PACKAGES[name]) is not None
