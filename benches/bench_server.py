"""Benchmarks `kvloft serve`: startup time, CPU time, and memory usage excluding the arena.

Measures the time until the server accepts connections, its CPU time (idle, and with 8 engines
doing lookups), its memory per chunk, and how 10,000 connections affect lookups and memory. Reads
the server process's CPU time and memory from /proc. Requires neither a GPU nor a model.
"""

import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvloft import _core

FRAME_BYTES, NAMESPACE = 4096, b"b" * 32
NUM_ENGINES, LOOKUPS_PER_S, SECONDS = 8, 100, 8.0
NUM_CHUNKS, PROMPT_CHUNKS = 1_000_000, 8192
NUM_CONNECTIONS = 10_000
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(*more: str, host_size: str = "16GiB") -> Iterator[tuple[str, int]]:
    """Yield the socket path and process id of a new server, and kill the server on exit."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        path = f"{folder}/run/kv.sock"
        argv = [
            sys.executable,
            "-m",
            "kvloft.cli",
            "serve",
            f"--socket={path}",
            f"--host-size={host_size}",
            *more,
        ]
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        try:
            yield path, process.pid
        finally:
            process.kill()
            process.wait()


def connect(path: str) -> _core.Session:
    session = _core.Session.connect(
        path, frame_bytes=FRAME_BYTES, namespace=NAMESPACE, timeout_s=5.0
    )
    deadline = time.monotonic() + 60
    while not session.arena_sizes[0]:  # lookups are misses until the server accepts connections
        assert time.monotonic() < deadline, "no server"
        time.sleep(0.001)
        session.renew()
    return session


def until_it_listens(path: str) -> None:
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as client:
                return client.connect(path)
        except OSError:
            time.sleep(0.001)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def anonymous_bytes(pid: int) -> int:
    """Return the process's anonymous memory in bytes. The arena is a file, so it is excluded."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def prompt(seed: int, num_chunks: int) -> _core.KeyChain:
    chain = _core.KeyChain(_core.root_key(NAMESPACE, None, None), block_tokens=1)
    chain.append_tokens(list(range(seed << 16, (seed << 16) + num_chunks)))
    return chain


def save(session: _core.Session, chain: _core.KeyChain, num_chunks: int) -> None:
    (chunks,), _ = session.reserve(
        [(chain, (), 0, 0, num_chunks, [list(range(1, num_chunks + 1))])]
    )
    session.settle(chunks.tickets())


def told(what: str, value: float, unit: str, target: float | None = None) -> None:
    verdict = (
        "" if target is None else f"target {target:g}: {'met' if value <= target else 'NOT met'}"
    )
    print(f"{what:>72} {value:>10,.1f} {unit:<8} {verdict}", flush=True)


def starts() -> None:
    for more in ((), ("--numa=0",)):
        begin = time.monotonic()
        with serving(*more) as (path, _):
            until_it_listens(path)
            listens_s = time.monotonic() - begin
            own = time.monotonic()
            connect(path).close()
            hello_s = time.monotonic() - own
        told(
            f"time from process start until the server accepts connections {' '.join(more)}",
            1000 * listens_s,
            "ms",
        )
        told("first engine's handshake, which creates the 16 GiB arena", 1000 * hello_s, "ms")
        told(
            "time from process start until the first engine has the arena",
            1000 * (listens_s + hello_s),
            "ms",
            300,
        )
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        begin = time.monotonic()
        server = _core.Server(f"{folder}/run/kv.sock", host_bytes=16 << 30)
        connect(f"{folder}/run/kv.sock").close()
        told(
            "in-process server: time until the first engine has the 16 GiB arena",
            1000 * (time.monotonic() - begin),
            "ms",
            300,
        )
        server.close(0.0)


def idle_and_busy() -> None:
    with serving() as (path, pid):
        until_it_listens(path)
        engines = [connect(path) for _ in range(NUM_ENGINES)]
        before = cpu_s(pid)
        time.sleep(SECONDS)
        told(f"{NUM_ENGINES} idle engines", 100 * (cpu_s(pid) - before) / SECONDS, "% core", 1)
        for num_chunks in (512, PROMPT_CHUNKS):
            prompts = [prompt(seed, num_chunks) for seed in range(NUM_ENGINES)]
            for chain in prompts:
                save(engines[0], chain, num_chunks)
            before, begin = cpu_s(pid), time.monotonic()
            threads = [
                threading.Thread(target=ask, args=(engine, prompts, nth))
                for nth, engine in enumerate(engines)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            share = 100 * (cpu_s(pid) - before) / (time.monotonic() - begin)
            told(
                f"{NUM_ENGINES} engines x {LOOKUPS_PER_S} lookups/s, alternating prompts of "
                f"{num_chunks} chunks",
                share,
                "% core",
                50,
            )
        for engine in engines:
            engine.close()


def ask(engine: _core.Session, prompts: list[_core.KeyChain], nth: int) -> None:
    """Look up each of ``prompts`` in turn, at LOOKUPS_PER_S lookups per second."""
    begin = time.monotonic()
    for number in range(int(LOOKUPS_PER_S * SECONDS)):
        time.sleep(max(0.0, begin + number / LOOKUPS_PER_S - time.monotonic()))
        engine.lookup(prompts[(number + nth) % len(prompts)])


def memory() -> None:
    for times in (1, 4):
        with serving(host_size=str(times * NUM_CHUNKS * FRAME_BYTES)) as (path, pid):
            until_it_listens(path)
            engine = connect(path)
            before = anonymous_bytes(pid)
            for seed in range(NUM_CHUNKS // PROMPT_CHUNKS):
                save(engine, prompt(seed, PROMPT_CHUNKS), PROMPT_CHUNKS)
            num = _core.server_status(path)["namespaces"][0]["stats"]["frames_visible"]
            after = anonymous_bytes(pid)
            frames = f"{num:,} chunks in {times * NUM_CHUNKS:,} frames"
            told(
                f"memory per chunk, excluding the arena and a fixed 50 MiB, {frames}",
                (after - (50 << 20)) / num,
                "bytes",
                300,
            )
            told("memory before the first chunk, excluding the arena", before / 2**20, "MiB")
            engine.close()


def crowd() -> None:
    """Measure lookup times and memory while the server's user opens 10,000 connections.

    The server rejects most of them, because it serves at most 64 at a time.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with serving(host_size="64MiB") as (path, pid):
        until_it_listens(path)
        engine, chain = connect(path), prompt(1, 100)
        save(engine, chain, 100)
        before, clients, begin, slowest = (
            anonymous_bytes(pid),
            list[socket.socket](),
            time.monotonic(),
            0.0,
        )
        for nth in range(NUM_CONNECTIONS):
            client = socket.socket(socket.AF_UNIX)
            client.connect(path)
            clients.append(client)
            if nth % 100 == 0:
                own = time.monotonic()
                assert engine.lookup(chain) == (100, 100)
                slowest = max(slowest, time.monotonic() - own)
            if len(clients) == 500:
                for old in clients:
                    old.close()
                clients.clear()
        told(
            f"opening {NUM_CONNECTIONS:,} connections, at most 500 of them open at a time",
            time.monotonic() - begin,
            "s",
        )
        told("slowest of 100 lookups while opening connections", 1000 * slowest, "ms")
        told(
            "additional memory after closing the connections",
            (anonymous_bytes(pid) - before) / 2**20,
            "MiB",
        )
        stats = _core.server_status(path)["stats"]
        told("rejected connections", stats["server_refused"], "")
        engine.close()


if __name__ == "__main__":
    print(f"load average: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    starts()
    memory()
    crowd()
    idle_and_busy()
