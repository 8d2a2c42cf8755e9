"""Tests real engines that share one `kvloft serve`. If an engine or the server dies, the other
engines get misses, but they continue and never generate a wrong token.
"""

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloft._core import Session, server_evict

from . import storm, tiny
from .cache_server import CacheServer, until
from .client import PACE, Engine, EngineError, Req, Zygote, engine_kwargs, full_blocks, random_ids
from .conftest import Truth

PROMPTS = [Req(random_ids(7000 + i, 150 + 7 * i), max_tokens=12) for i in range(6)]
FULL = sum(full_blocks(p.num_prompt_tokens) for p in PROMPTS)


@pytest.fixture
def server() -> Iterator[CacheServer]:
    server = CacheServer().start()
    yield server
    server.close()


def shared(server: CacheServer, **more: Any) -> dict[str, Any]:
    """Return the kv_transfer_config of an engine that uses ``server``.

    The deadline is long, because a busy machine cannot meet short deadlines.
    """
    extra = {"server": f"unix:{server.socket}", "server_timeout": f"{10 * PACE}s"} | more
    return {
        "kv_connector": "KVLoftConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def ask_all(truth: Truth, engine: Engine) -> int:
    """Run every prompt, check its tokens, and return the number of external tokens."""
    results = engine.ask(*[p.again() for p in PROMPTS])
    assert [r.tokens for r in results] == [truth.tokens(p) for p in PROMPTS]
    return sum(r.num_external for r in results)


def until_full(truth: Truth, engine: Engine) -> None:
    until(lambda: ask_all(truth, engine) == FULL, "hits do not return")


def has_disk_chunks(server: CacheServer) -> bool:
    """Return True if an engine is connected and the server has found its chunks on disk."""
    spaces = server.namespaces()
    return any(s["engines"] and (s["stats"] or {}).get("disk_used") for s in spaces)


def test_an_engine_loads_chunks_of_another(
    truth: Truth, start: Callable[..., Engine], server: CacheServer
) -> None:
    one, other = (start(kv_transfer_config=shared(server), num_blocks=120) for _ in range(2))
    assert ask_all(truth, one) == 0
    assert ask_all(truth, other) == FULL
    assert other.metrics()["vllm:kvloft_load_tokens_host_total"] == FULL
    other.stop()
    again = start(kv_transfer_config=shared(server), num_blocks=120)
    assert ask_all(truth, again) == FULL, "a restarted engine must find the server's chunks"
    assert again.metrics()["vllm:kvloft_load_tokens_host_total"] == FULL
    again.assert_at_rest()
    server.assert_at_rest()
    (space,) = server.namespaces()
    assert len(space["engines"]) == 2


def test_a_server_that_was_stopped_has_everything_on_disk(
    truth: Truth, start: Callable[..., Engine], server: CacheServer
) -> None:
    engine = start(kv_transfer_config=shared(server), num_blocks=120)
    assert ask_all(truth, engine) == 0
    assert server.end(signal.SIGTERM) == 0
    assert ask_all(truth, engine) == 0
    server.start(host_size="32MiB")
    # A prompt sent before the engine reconnects would be saved again and then be a hit in host
    # memory.
    until(lambda: has_disk_chunks(server), "the engine does not reconnect")
    until_full(truth, engine)
    assert engine.metrics()["vllm:kvloft_load_tokens_disk_total"] > 0
    assert "lost the connection" in engine.log.read_text()
    engine.assert_at_rest()


def test_a_tenant_that_is_evicted_is_computed_again(
    truth: Truth, start: Callable[..., Engine], server: CacheServer
) -> None:
    engine = start(kv_transfer_config=shared(server), num_blocks=120)
    asked = [PROMPTS[0].again(salt=salt) for salt in (None, "one", "two")]

    def external() -> list[int]:
        results = [engine.ask(request.again())[0] for request in asked]
        assert [r.tokens for r in results] == [truth.tokens(PROMPTS[0])] * len(asked)
        return [r.num_external for r in results]

    whole = full_blocks(PROMPTS[0].num_prompt_tokens)
    assert external() == [0, 0, 0]
    until(lambda: external() == [whole] * 3, "not all chunks are saved")
    done = server_evict(str(server.socket), salt="one")
    assert (done["chunks"] > 0, done["complete"]) == (True, True)
    assert external() == [whole, 0, whole]
    engine.assert_at_rest()
    server.assert_at_rest()


def test_kill_9_of_an_engine_that_saves_leaves_the_other_and_no_reservation(
    truth: Truth, start: Callable[..., Engine], server: CacheServer
) -> None:
    for steps in (1, 3):
        doomed = start(kv_transfer_config=shared(server), num_blocks=120, max_num_batched_tokens=64)
        other = start(kv_transfer_config=shared(server), num_blocks=120)
        doomed.add(*[p.again() for p in PROMPTS])
        doomed.step(steps)
        running = threading.Thread(target=run_to_its_death, args=(doomed,))
        running.start()
        os.kill(doomed.pid, signal.SIGKILL)
        assert ask_all(truth, other) <= FULL
        running.join()
        # frames to which the dead engine was writing are quarantined for a while
        until_full(truth, other)
        server.assert_at_rest()
        other.stop()


def run_to_its_death(engine: Engine) -> None:
    with pytest.raises(EngineError):
        while True:
            engine.step()


def test_kill_9_of_the_server_costs_misses_until_it_is_back(
    truth: Truth, start: Callable[..., Engine], server: CacheServer
) -> None:
    engine = start(kv_transfer_config=shared(server), num_blocks=120)
    assert ask_all(truth, engine) == 0
    engine.flush()
    for _ in range(3):
        server.end()
        assert ask_all(truth, engine) == 0
        server.start()
        until_full(truth, engine)
    engine.assert_at_rest()
    server.assert_at_rest()


def test_the_server_dies_at_any_moment_and_no_token_is_wrong(
    truth: Truth, start: Callable[..., Engine], server: CacheServer
) -> None:
    engine = start(kv_transfer_config=shared(server), num_blocks=120, max_num_batched_tokens=64)
    for steps in (0, 2, 5):
        requests = [p.again() for p in PROMPTS]
        engine.add(*requests)
        engine.step(1 + 2 * steps)
        server.end()
        engine.step(1 + steps)
        server.start()
        results = engine.run()
        assert [results[r.id].tokens for r in requests] == [truth.tokens(p) for p in PROMPTS]
    until_full(truth, engine)
    engine.assert_at_rest()
    assert engine.metrics()["vllm:kvloft_hook_errors_total"] == 0


def test_a_server_that_is_killed_and_frozen_under_load_costs_no_token(
    truth: Truth, start: Callable[..., Engine], server: CacheServer
) -> None:
    engine = start(kv_transfer_config=storm.settings(server), num_blocks=120)
    result = storm.storm(engine, server, truth, rounds=4, seed=5, progress=str)
    assert not result["problems"]
    assert result["hooks_s"]["kill -9"] and result["hooks_s"]["freeze"]
    engine.assert_at_rest()
    server.assert_at_rest()


def test_a_frozen_server_delays_one_lookup_and_one_save_by_their_deadline(
    truth: Truth, start: Callable[..., Engine], server: CacheServer
) -> None:
    engine = start(kv_transfer_config=shared(server, server_timeout="200ms"), num_blocks=120)
    until_full(truth, engine)
    num_late = engine.store()["server_late"]  # on a busy machine, some calls are late
    server.freeze()
    assert ask_all(truth, engine) == 0
    assert engine.store()["server_late"] <= num_late + 2, (
        "only one lookup and one save may wait for a frozen server"
    )
    server.send(signal.SIGCONT)
    until_full(truth, engine)
    assert engine.store()["server_lost"] == 0
    engine.assert_at_rest()


def test_an_engine_that_starts_before_its_server_connects_later(
    truth: Truth, start: Callable[..., Engine], server: CacheServer
) -> None:
    server.end()
    engine = start(kv_transfer_config=shared(server), num_blocks=120)
    assert "cannot connect to a kvloft server" in engine.log.read_text()
    assert ask_all(truth, engine) == 0
    assert engine.metrics()["vllm:kvloft_server_connected"] == 0
    server.start()

    def has_connected() -> bool:
        lines = engine.log.read_text().splitlines()
        return any(
            "connected to the kvloft server" in line and "(namespace" in line for line in lines
        )

    until(has_connected, "an idle engine does not report the connection")
    until_full(truth, engine)
    assert engine.metrics()["vllm:kvloft_server_connected"] == 1


def test_another_shape_of_a_namespace_is_refused_in_one_sentence(
    start: Callable[..., Engine], server: CacheServer
) -> None:
    engine = start(kv_transfer_config=shared(server))
    size = server.namespaces()[0]["frame_sizes"][0]
    other = Session.connect(
        str(server.socket), frame_bytes=size, namespace=b"\1" * 32, timeout_s=60.0
    )
    refused = Session.connect(
        str(server.socket), frame_bytes=2 * size, namespace=b"\1" * 32, timeout_s=60.0
    )
    assert "use the same settings for all engines" in str(refused.take_events())
    assert not refused.arena_path
    refused.close()
    other.close()
    engine.stop()


@pytest.fixture
def other_model(zygote: Zygote, tmp_path: Path) -> Iterator[tuple[Path, Truth]]:
    """Return a model whose chunks are larger than those of `model`, and its reference outputs."""
    model = tiny.write_model(tmp_path / "other", num_heads=4, num_kv_heads=4)
    truth = Truth(lambda: zygote.engine(engine_kwargs(model, num_blocks=600)))
    yield model, truth
    truth.close()


def test_two_models_on_one_server_have_each_their_own(
    truth: Truth, start: Callable[..., Engine], server: CacheServer, other_model: tuple[Path, Truth]
) -> None:
    model, other_truth = other_model
    requests = [
        other_truth.pick(lambda seed: Req(random_ids(seed, 200), max_tokens=12), 9000 + nth)
        for nth in range(4)
    ]
    full = sum(full_blocks(request.num_prompt_tokens) for request in requests)
    one = start(kv_transfer_config=shared(server), num_blocks=120)
    other = start(kv_transfer_config=shared(server), num_blocks=120, model=model)

    def ask_other() -> int:
        results = other.ask(*[request.again() for request in requests])
        assert [result.tokens for result in results] == [
            other_truth.tokens(request) for request in requests
        ]
        return sum(result.num_external for result in results)

    assert (ask_all(truth, one), ask_other()) == (0, 0)
    assert (ask_all(truth, one), ask_other()) == (FULL, full)
    first, second = server.namespaces()
    assert first["frame_sizes"] != second["frame_sizes"]
    assert all(space["slabs"] and len(space["engines"]) == 1 for space in (first, second))
    assert other.reset(connector=True)
    assert ask_all(truth, one) == FULL, "a reset must clear only its own namespace"
    assert (ask_other(), ask_other()) == (0, full)
    os.kill(other.pid, signal.SIGKILL)
    assert ask_all(truth, one) == FULL
    server.assert_at_rest()
    other = start(kv_transfer_config=shared(server), num_blocks=120, model=model)
    assert ask_other() == full
    other.stop()


def test_two_models_want_more_memory_than_there_is_and_no_token_is_wrong(
    truth: Truth, start: Callable[..., Engine], server: CacheServer, other_model: tuple[Path, Truth]
) -> None:
    model, other_truth = other_model
    server.end()
    server.start(host_size="1MiB")
    requests = [
        other_truth.pick(lambda seed: Req(random_ids(seed, 200), max_tokens=12), 9000 + nth)
        for nth in range(6)
    ]
    # The chunks of this engine are larger. The first engine determines the slab size.
    other = start(kv_transfer_config=shared(server), num_blocks=120, model=model)
    one = start(kv_transfer_config=shared(server), num_blocks=120)
    hits = [0, 0]
    for nth in range(8):
        hits[0] += ask_all(truth, one)
        for request in requests[nth % 2 :: 2]:
            for _ in range(2):
                result = other.ask(request.again())[0]
                assert result.tokens == other_truth.tokens(request)
                hits[1] += result.num_external
    assert min(hits) > 0
    assert sum(space["stats"]["host_evictions"] for space in server.namespaces()) > 0
    assert all(space["slabs"] for space in server.namespaces())
    for engine in (one, other):
        assert engine.metrics()["vllm:kvloft_verify_failures_total"] == 0
        engine.assert_at_rest()
    server.assert_at_rest()


def test_reset_empties_the_shared_cache(
    truth: Truth, start: Callable[..., Engine], server: CacheServer
) -> None:
    one, other = (start(kv_transfer_config=shared(server), num_blocks=120) for _ in range(2))
    ask_all(truth, one)
    assert one.reset(connector=True)
    assert ask_all(truth, other) == 0
    assert ask_all(truth, one) == FULL


def test_two_ranks_map_the_memory_of_a_restarted_server(
    zygote: Zygote, start: Callable[..., Engine], server: CacheServer, tmp_path: Path
) -> None:
    """With two ranks, the workers are separate processes."""
    model = tiny.write_model(tmp_path / "model", num_heads=4, num_kv_heads=2)
    truth = Truth(lambda: zygote.engine(engine_kwargs(model)))
    request = truth.pick(lambda s: Req(random_ids(s, 100), max_tokens=20), 7000)
    ranks = {"VLLM_CPU_OMP_THREADS_BIND": "0|0"}
    engine = start(
        kv_transfer_config=shared(server), model=model, tensor_parallel_size=2, env=ranks
    )

    def ask() -> int:
        result = engine.ask(request.again())[0]
        assert result.tokens == truth.tokens(request)
        return result.num_external

    assert (ask(), ask()) == (0, 96)
    engine.flush()
    for host_size in ("32MiB", "64MiB"):
        server.end()
        assert ask() == 0
        server.start(host_size=host_size)
        until(lambda: ask() == 96, "hits do not return")
        assert ask() == 96
    engine.stop()
    truth.close()


def test_engines_share_a_server_that_they_start_themselves(
    truth: Truth, start: Callable[..., Engine]
) -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # a socket path must be short
        socket = Path(folder) / "kvloft" / "auto.sock"
        extra = {
            "server": "auto",
            "server_timeout": f"{10 * PACE}s",
            "server_linger": "2s",
            "host_size": "64MiB",
        }
        transfer = {
            "kv_connector": "KVLoftConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        env = {"XDG_RUNTIME_DIR": folder}
        one, other = (start(kv_transfer_config=transfer, num_blocks=120, env=env) for _ in range(2))
        assert ask_all(truth, one) == 0
        assert ask_all(truth, other) == FULL
        (pid,) = _servers_at(socket)
        os.kill(pid, signal.SIGKILL)
        assert ask_all(truth, one) == 0, "a process of the server is still running"
        until(lambda: _servers_at(socket) not in ([], [pid]), "no engine starts another server")
        until_full(truth, one)
        until_full(truth, other)
        one.stop()
        other.stop()
        until(lambda: not _servers_at(socket), "the server does not exit after the last engine")


def _servers_at(socket: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"--socket={socket}".encode() in (process / "cmdline").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found
