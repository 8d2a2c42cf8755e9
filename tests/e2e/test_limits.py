"""Tests tenant limits with real engines on one `kvloft serve`: a tenant at its quota evicts only
its own chunks, and expired chunks are removed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .cache_server import CacheServer, until
from .client import BLOCK, Engine, Req, full_blocks
from .conftest import Truth
from .test_server import PROMPTS, shared


@pytest.fixture
def server() -> Iterator[CacheServer]:
    server = CacheServer().start()
    yield server
    server.close()


def external(truth: Truth, engine: Engine, requests: list[Req]) -> int:
    """Run the requests one after another, check their tokens, and return the number of external
    tokens.
    """
    results = [engine.ask(request.again())[0] for request in requests]
    assert [r.tokens for r in results] == [truth.tokens(request) for request in requests]
    return sum(r.num_external for r in results)


def of_salt(salt: str | None, prompts: list[Req]) -> list[Req]:
    return [prompt.again(salt=salt) for prompt in prompts]


def frame_bytes(server: CacheServer) -> int:
    number: int = server.namespaces()[0]["frame_sizes"][0]
    return number


def tenants(server: CacheServer) -> list[dict[str, Any]]:
    (space,) = server.namespaces()
    rows: list[dict[str, Any]] = space["tenants"]
    return rows


def others(server: CacheServer) -> list[int]:
    """Return the number of bytes that each tenant below its quota has in host memory."""
    small = min(row["host_bytes"] for row in tenants(server) if row["tag"] is not None)
    return [small, *(row["host_bytes"] for row in tenants(server) if row["tag"] is None)]


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_tenant_over_its_quota_takes_nothing_from_another(
    truth: Truth, start: Callable[..., Engine], server: CacheServer, num_engines: int
) -> None:
    transfer = shared(server)
    engines = [start(kv_transfer_config=transfer, num_blocks=120) for _ in range(num_engines)]
    most = full_blocks(PROMPTS[0].num_prompt_tokens) // BLOCK + 2
    quota = most * frame_bytes(server)
    server.end()
    # Host memory has space only for the other tenants' chunks plus the quota of one tenant. Without
    # a quota, all tenants would lose chunks.
    needed = len(PROMPTS) * most
    limits = {"salt_quota": f"{quota}B", "salt_disk_quota": f"{quota}B"}
    server.serve({"host_size": f"{needed * quota // most}B"} | server.disk | limits)
    small, unsalted, big = (
        of_salt("small", PROMPTS[:1]),
        of_salt(None, PROMPTS[:2]),
        of_salt("big", PROMPTS),
    )
    whole = [
        sum(full_blocks(r.num_prompt_tokens) for r in requests) for requests in (small, unsalted)
    ]
    until(
        lambda: [external(truth, engines[0], requests) for requests in (small, unsalted)] == whole,
        "not all chunks are saved",
    )
    before = others(server)
    for _ in range(2):
        assert external(truth, engines[-1], big) <= most * BLOCK, "the tenant exceeds its quota"
        for row in tenants(server):
            assert row["tag"] is None or (
                row["host_bytes"] <= quota and row["disk_bytes"] <= quota
            ), row
    assert others(server) == before, "another tenant lost memory"
    assert [external(truth, engines[0], requests) for requests in (small, unsalted)] == whole
    (space,) = server.namespaces()
    assert space["stats"]["quota_evictions"] > 0
    for engine in engines:
        engine.assert_at_rest()
    server.assert_at_rest()


def test_expired_chunks_are_computed_again(
    truth: Truth, start: Callable[..., Engine], server: CacheServer
) -> None:
    server.end()
    server.serve({"host_size": "64MiB", "salt_ttl": "20s"} | server.disk)
    engine = start(kv_transfer_config=shared(server), num_blocks=120)
    whole = full_blocks(PROMPTS[0].num_prompt_tokens)

    def both() -> list[int]:
        return [external(truth, engine, of_salt(salt, PROMPTS[:1])) for salt in (None, "one")]

    assert both() == [0, 0]
    until(lambda: both() == [whole, whole], "not all chunks are saved")
    until(lambda: both() == [whole, 0], "the chunks do not expire")
    until(lambda: both() == [whole, whole], "the chunks are not saved again")
    engine.assert_at_rest()
    server.assert_at_rest()


def test_the_store_of_one_engine_has_limits_too(
    truth: Truth, start: Callable[..., Engine], tmp_path: Any
) -> None:
    """Prompts with a salt whose quota is zero are always computed."""
    limits = tmp_path / "limits.yaml"
    limits.write_text("- {salt: one, quota: 0}\n")
    extra = {"host_size": "64MiB", "salt_limits": str(limits)}
    transfer = {
        "kv_connector": "KVLoftConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    engine = start(kv_transfer_config=transfer, num_blocks=120)
    whole = full_blocks(PROMPTS[0].num_prompt_tokens)
    for wanted in ([0, 0], [0, whole], [0, whole]):
        assert [
            external(truth, engine, of_salt(salt, PROMPTS[:1])) for salt in ("one", "two")
        ] == wanted
    assert engine.metrics()["vllm:kvloft_quota_dropped_total"] > 0
    engine.assert_at_rest()
