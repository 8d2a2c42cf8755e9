"""The test's side of an engine process: classes for requests and a handle per engine.

This module uses the protocol of engine.py and does not import vLLM.
"""

import base64
import contextlib
import itertools
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cache_server import IS_SERVED, CacheServer, argv_instead, end, instead

BLOCK = 32
"""Number of tokens per block in vLLM's CPU backend in these tests."""

PACE = float(os.environ.get("TEST_PACE", "1"))
"""Factor by which this machine is slower than usual. All timeouts are multiplied by this factor."""

_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Req:
    """A request with greedy sampling.

    ``embeds`` is a float32 array of shape (positions, hidden). With ``is_token``, the prompt mixes
    tokens and embeddings.
    """

    ids: tuple[int, ...] | None = None
    embeds: NDArray[np.float32] | None = None
    is_token: tuple[bool, ...] | None = None
    max_tokens: int = 8
    salt: str | None = None
    lora: tuple[str, int, str] | tuple[str, int, str, bool] | None = None
    """LoRARequest's name, number, path and, optionally, load_inplace."""
    skip_reading: bool = False
    logprobs: int | None = None
    id: str = field(default_factory=lambda: f"r{next(_ids)}")

    @property
    def num_prompt_tokens(self) -> int:
        return (
            len(self.ids)
            if self.ids is not None
            else len(self.embeds)
            if self.embeds is not None
            else 0
        )

    def again(self, **changes: Any) -> "Req":
        """Return a copy of the request with a new id and with ``changes`` applied."""
        return replace(self, **{"id": f"r{next(_ids)}"} | changes)

    def message(self) -> dict[str, Any]:
        """Return the fields for engine.Engine._add."""
        fields: dict[str, Any] = {
            "id": self.id,
            "max_tokens": self.max_tokens,
            "skip_reading": self.skip_reading,
            "logprobs": self.logprobs,
        }
        if self.ids is not None:
            fields["ids"] = list(self.ids)
        if self.embeds is not None:
            rows = np.ascontiguousarray(self.embeds, dtype=np.float32)
            fields |= {"embeds": base64.b64encode(rows.tobytes()).decode(), "width": rows.shape[1]}
        if self.is_token is not None:
            fields["is_token"] = list(self.is_token)
        return fields | {
            k: v for k, v in {"salt": self.salt, "lora": self.lora and list(self.lora)}.items() if v
        }


@dataclass(frozen=True, slots=True)
class Result:
    """A request's output tokens, and the number of external tokens at each admission (the first
    admission, and one after each preemption).
    """

    tokens: tuple[int, ...]
    finish: str
    margin: float | None
    cached: int | None
    external: tuple[int, ...]
    resumed: tuple[int, ...]

    @property
    def num_external(self) -> int:
        """Number of external tokens at the first admission."""
        return self.external[0] if self.external else 0


class EngineError(RuntimeError):
    """The engine process returned an error or exited."""


class Engine:
    """An engine process with a tiny block pool.

    ``kill`` sends SIGKILL. ``stop`` shuts the engine down cleanly.
    """

    def __init__(
        self,
        address: Path,
        kwargs: dict[str, Any],
        *,
        log: Path,
        env: dict[str, str] | None = None,
        v2_shape: bool = False,
        prepare: str = "",
    ) -> None:
        self.log = log
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(address))
        self._stream = self._socket.makefile("rw")
        self.pid: int = 0
        self._servers: list[CacheServer] = []
        try:
            if IS_SERVED and "kv_transfer_config" in kwargs:
                kwargs = kwargs | {
                    "kv_transfer_config": instead(kwargs["kv_transfer_config"], self._servers)
                }
            self.pid = self._ask(
                "start",
                kwargs=kwargs,
                env=env or {},
                log=str(log),
                v2_shape=v2_shape,
                prepare=prepare,
            )
            for server in self._servers:
                assert server.namespaces(), (
                    "the engine uses an embedded store instead of the server"
                )
        except BaseException:
            self._close()
            end(self._servers, signal.SIGKILL)
            raise

    def _ask(self, op: str, **fields: Any) -> Any:
        try:
            self._stream.write(json.dumps({"op": op} | fields) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = ""
        if not line:
            raise EngineError(f"engine process died in {op!r}\n{self.tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{op}: {answer['error']}\n{self.tail()}")
        return answer["ok"]

    def tail(self, num_bytes: int = 3000) -> str:
        """Return the end of the engine's log."""
        with contextlib.suppress(OSError):
            return self.log.read_bytes()[-num_bytes:].decode(errors="replace")
        return ""

    def store_log(self) -> str:
        """Return the complete logs of the engine and its server."""
        return "\n".join(
            log.read_text() for log in [self.log, *[server.log for server in self._servers]]
        )

    def add(self, *requests: Req) -> None:
        """Add requests to the queue without running a step."""
        self._ask("add", requests=[r.message() for r in requests])

    def step(self, count: int = 1) -> list[str]:
        """Run engine steps and return the ids of requests that finished."""
        return self._ask("step", count=count)

    def run(self) -> dict[str, Result]:
        """Step until the engine and its transfers are idle, and return the results by id."""
        return {
            i: Result(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
            for i, fields in self._ask("run").items()
        }

    def ask(self, *requests: Req) -> list[Result]:
        """Add all requests, run until the engine is idle, and return their results in order."""
        self.add(*requests)
        results = self.run()
        return [results[r.id] for r in requests]

    def ask_each(self, *requests: Req) -> list[Result]:
        """Do the same as `ask`, but run the requests one after another."""
        return [self.ask(r)[0] for r in requests]

    def abort(self, *ids: str) -> None:
        self._ask("abort", ids=list(ids))

    def reset(self, *, connector: bool = False, running: bool = False) -> bool:
        """Call vLLM's reset_prefix_cache."""
        return self._ask("reset", connector=connector, running=running)

    def reload(self, path: Path) -> None:
        """Call vLLM's reload_weights with another model's directory."""
        self._ask("reload", path=str(path))

    def print(self) -> str:
        """Return the output of ``print(llm)``."""
        return self._ask("print")

    def rpc(self, method: str, *args: Any) -> None:
        """Call vLLM's collective_rpc."""
        self._ask("rpc", method=method, args=list(args))

    def core(self, method: str, **kwargs: Any) -> None:
        """Call a method of vLLM's engine core."""
        self._ask("core", method=method, kwargs=kwargs)

    def preempt_as_0_26(self, *, deferred: bool = False) -> None:
        """Make the engine preempt requests as vLLM 0.26 does.

        With ``deferred``, it also frees blocks as late as vLLM 0.26 does for other connectors.
        """
        self._ask("old_preemption", deferred=deferred)

    def state(self) -> dict[str, Any]:
        return self._ask("state")

    def status(self, request: Req) -> str | None:
        """Return the name of the request's status in vLLM, or None if vLLM has removed the
        request.
        """
        return self.state()["status"].get(request.id)

    def metrics(self) -> dict[str, float]:
        return self._ask("metrics")

    def call(self, path: str, *args: Any) -> Any:
        """Read or call an attribute of the scheduler-side connector."""
        return self._ask("call", path=path, args=list(args))

    def probe(self, name: str, **arguments: Any) -> Any:
        """Call a function of zoo/probe.py."""
        return self._ask("probe", name=name, arguments=arguments)

    def time_hooks(self) -> None:
        """Start measuring each step's time in the scheduler-side connector."""
        self._ask("time_hooks")

    def hooks_s(self) -> list[float]:
        """Return the seconds that each step spent in the connector since the last call."""
        return list(self._ask("hooks_s"))

    def detach(self, *, away: bool) -> None:
        """Detach or reattach the connector."""
        self._ask("detach", away=away)

    def store(self) -> dict[str, int]:
        """Return the current counters and gauges of kvloft's store."""
        return self.call("_scheduler._store.stats")

    def flush(self) -> None:
        """Wait until all chunks queued for the disk are written."""
        assert self.call("_scheduler._store.flush", 60.0 * PACE) is True

    def wait_for_disk(self) -> None:
        """Wait until lookups can find chunks on disk."""
        deadline = time.monotonic() + 60 * PACE
        while not self.store()["disk_used"]:
            assert time.monotonic() < deadline, "the disk tier was not reopened"
            time.sleep(0.1)

    def assert_at_rest(self) -> None:
        """Check that nothing is pinned, reserved or queued (I5, I8)."""
        state, store = self.state(), self.store()
        # Disk reads that no request waits for can complete later.
        for _ in range(int(1200 * PACE)):
            if not store["pins"] and not store["frames_reserved"]:
                break
            time.sleep(0.05)
            store = self.store()
        assert not state["busy"] and not state["status"], state
        assert state["free_blocks"] == state["num_blocks"] - 1, state
        assert (store["pins"], store["frames_reserved"]) == (0, 0), store
        assert store["frames_visible"] + store["frames_free"] == store["frames_total"], store

    def flip_frames(self, *, keep: int = 0, offset: int = 5) -> int:
        """Flip a bit at ``offset`` in each used frame of the host tier, except in the first
        ``keep`` frames, and return the number of flipped bits.
        """
        frame_bytes = self.call("_scheduler._store.frame_sizes")[0]
        with (
            open(self.call("_scheduler._store.arena_path"), "r+b") as file,
            mmap.mmap(file.fileno(), 0) as arena,
        ):
            # the size of a server's arena is not always a multiple of the frame size
            whole = len(arena) // frame_bytes * frame_bytes
            frames = np.frombuffer(arena, dtype=np.uint8, count=whole).reshape(-1, frame_bytes)
            used = np.flatnonzero(frames[:, :64].any(axis=1))[keep:]
            frames[used, offset] ^= 1
            del frames
        return len(used)

    def stop(self) -> None:
        if self.pid:
            self._ask("stop")
            self._gone()
            end(self._servers, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL and wait until the process has exited."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._gone()
            end(self._servers, signal.SIGKILL)

    def _close(self) -> None:
        # The engine may have been killed before it read the last message.
        with contextlib.suppress(OSError):
            self._stream.close()
        self._socket.close()

    def _gone(self) -> None:
        self._close()
        deadline = time.monotonic() + 30 * PACE
        while Path(f"/proc/{self.pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.pid = 0


class Server:
    """A ``vllm serve`` process, started as users start it.

    The API server, the engine core and the worker are separate processes. Tests send HTTP requests.
    """

    def __init__(self, address: Path, argv: list[str], *, log: Path, port: int) -> None:
        self.log, self.url = log, f"http://127.0.0.1:{port}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(address))
        self._stream = self._socket.makefile("rw")
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self._servers: list[CacheServer] = []
        if IS_SERVED:
            argv = argv_instead(argv, self._servers)
        self.pid = int(
            self._ask("serve_http", argv=[*argv, "--port", str(port)], env=env, log=str(log))
        )

    def _ask(self, op: str, **fields: Any) -> Any:
        self._stream.write(json.dumps({"op": op} | fields) + "\n")
        self._stream.flush()
        return json.loads(self._stream.readline())["ok"]

    def wait(self, timeout_s: float = 150.0 * PACE) -> "Server":
        """Wait until the server is healthy."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.get("/health")
            except OSError:
                alive = Path(f"/proc/{self.pid}/cmdline")
                if time.monotonic() > deadline or not (alive.exists() and alive.read_bytes()):
                    raise EngineError(
                        "server did not start:\n" + self.log.read_text()[-6000:]
                    ) from None
                time.sleep(0.2)
            else:
                return self

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30 * PACE) as response:
            return response.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a POST request with JSON and return the response.

        Raises an exception that contains the response body if the status is an error.
        """
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120 * PACE) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise EngineError(f"{error.code}: {error.read().decode()}") from error

    def metrics(self) -> dict[str, float]:
        """Return the metrics from /metrics, summed over labels."""
        totals: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if line and not line.startswith("#"):
                name, value = line.split("{")[0].split()[0], line.rsplit(None, 1)[1]
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def bench(self, argv: list[str], log: Path) -> None:
        """Run ``vllm bench serve`` against this server. Raises an exception if it fails."""
        if self._ask("bench", argv=["--base-url", self.url, *argv], log=str(log)) != 0:
            raise EngineError(log.read_text()[-4000:])

    def stop(self) -> None:
        """Send SIGTERM, as a service manager does, and wait until every process has exited."""
        if self.pid:
            os.killpg(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + 60 * PACE
            while _group_alive(self.pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._stream.close()
            self._socket.close()
            self.pid = 0
            end(self._servers, signal.SIGTERM)


def _group_alive(group: int) -> bool:
    """Return True if a process of the group is still running. Zombies are ignored."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False


class Zygote:
    """A handle for the process that forks engines (see zygote.py)."""

    def __init__(self, folder: Path) -> None:
        self.address = folder / "zygote.sock"
        self._log = folder / "zygote.log"
        package = __package__ or ""
        root = Path(__file__).parents[package.count(".") + 1]
        env = (
            os.environ
            | ENV
            | {
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [str(root), os.environ.get("PYTHONPATH")])
                )
            }
        )
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{package}.zygote", str(self.address), str(os.getpid())],
                env=env,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self._folder, self._count = folder, itertools.count()

    def wait(self, timeout_s: float = 180.0 * PACE) -> None:
        """Wait until the process accepts connections."""
        deadline = time.monotonic() + timeout_s
        while not self.address.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise EngineError("zygote did not start:\n" + self._log.read_text()[-6000:])
            time.sleep(0.05)

    def engine(
        self,
        kwargs: dict[str, Any],
        *,
        env: dict[str, str] | None = None,
        v2_shape: bool = False,
        prepare: str = "",
    ) -> Engine:
        self.wait()
        log = self._folder / f"engine{next(self._count)}.log"
        return Engine(self.address, kwargs, log=log, env=env, v2_shape=v2_shape, prepare=prepare)

    def server(self, argv: list[str]) -> Server:
        """Fork a server without waiting until it is healthy."""
        self.wait()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return Server(
            self.address, argv, log=self._folder / f"server{next(self._count)}.log", port=port
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Environment variables for all vLLM processes. num_gpu_blocks_override sets the pool size.

Engines run eagerly. TORCHDYNAMO_DISABLE also covers the sampler's only compiled function, which
would start a C++ compiler in each new environment. Numba, which implements ngram drafting, would
use one OpenMP thread per core. On a busy machine, these threads would mostly wait for each other.
"""


def engine_kwargs(
    model: Path, *, num_blocks: int = 64, max_model_len: int | None = None, **more: Any
) -> dict[str, Any]:
    """Return the arguments for a small fp32 engine on the CPU."""
    fits = (num_blocks - 1) * BLOCK
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "seed": 0,
        "block_size": BLOCK,
        "max_model_len": max_model_len or min(fits, 1024),
        "num_gpu_blocks_override": num_blocks,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "disable_log_stats": False,
        "enable_prompt_embeds": True,
    } | more


def kvloft(
    disk_path: Path | None = None, *, policy: str | None = None, **extra: Any
) -> dict[str, Any]:
    """Return a kv_transfer_config for kvloft with a small host tier.

    With ``disk_path``, kvloft also has a disk tier. The load timeout is long, because the disk can
    be slow in these tests.
    """
    settings: dict[str, Any] = {"host_size": "64MiB", "load_timeout": f"{30 * PACE:g}s"} | extra
    if disk_path is not None:
        settings |= {"disk_path": str(disk_path), "disk_size": "256MiB"} | extra
    config: dict[str, Any] = {
        "kv_connector": "KVLoftConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    return config if policy is None else config | {"kv_load_failure_policy": policy}


def random_ids(seed: int, count: int) -> tuple[int, ...]:
    """Return random token ids, excluding special tokens."""
    return tuple(int(i) for i in np.random.default_rng(seed).integers(3, 512, count))


def full_blocks(num_tokens: int) -> int:
    """Return the number of tokens in the full blocks of a prefix with ``num_tokens`` tokens."""
    return num_tokens // BLOCK * BLOCK


def tokens_of(results: Sequence[Result]) -> list[tuple[int, ...]]:
    return [r.tokens for r in results]
