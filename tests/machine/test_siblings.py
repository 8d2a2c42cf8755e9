"""Tests that kvloft, in vLLM's real MultiConnector and scheduler, does not withhold a sibling
connector's tokens while kvloft waits for its disk.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.structured_output import StructuredOutputManager

from kvloft import _core
from vllm import SamplingParams

from .machine import MODEL
from .requests import make_request
from .shape import HASH, Shape, kv_config, vllm_config
from .symbols import Spec

BLOCK = 4
SHAPE = Shape(num_blocks=30)
SPEC = Spec("r", tuple(range(3, 3 + 4 * BLOCK + 1)), 2, tuple(range(3, 3 + 4 * BLOCK + 1)))


class NeverReady:
    """A lease on chunks that a hung disk never reads."""

    def poll(self) -> tuple[int, int]:
        return 0, 4

    def batch(self, *_: Any) -> Any:
        raise AssertionError("none of its chunks can be loaded")

    def release(self) -> None: ...


class HungDisk:
    """A store that has every prefix on a disk that does not respond."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def lookup(self, chain: Any) -> tuple[int, int]:
        return 0, min(4, chain.num_blocks)

    def acquire(self, chain: Any, num_units: int) -> NeverReady:
        return NeverReady()


class Sibling(KVConnectorBase_V1):
    """A sibling connector that has some tokens of every prompt, by default two blocks."""

    has: ClassVar[int | None] = 2 * BLOCK
    given: ClassVar[list[int]] = []

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.has, bool(self.has)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.given.append(num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
    def wait_for_save(self) -> None: ...


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that makes a vLLM scheduler with kvloft on a hung disk, alone or before a
    sibling.

    Each scheduler has one waiting request.
    """
    session = _core.Session
    monkeypatch.setattr(_core, "Session", lambda **settings: HungDisk(session(**settings)))
    monkeypatch.setattr(Sibling, "given", [])
    monkeypatch.setitem(KVConnectorFactory._registry, "Sibling", lambda: Sibling)
    made: list[Any] = []

    def make(*, has_sibling: bool) -> Any:
        made.append(scheduler_of(config_of(has_sibling=has_sibling)))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def config_of(*, has_sibling: bool) -> Any:
    config = vllm_config(MODEL, SHAPE, None, "")
    transfer = config.kv_transfer_config
    if has_sibling:
        child = {
            "kv_connector": "KVLoftConnector",
            "kv_connector_module_path": "kvloft.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": transfer.kv_connector_extra_config,
        }
        config.scheduler_config.disable_hybrid_kv_cache_manager = (
            True  # vLLM sets this option for siblings of this kind
        )
        transfer.kv_connector, transfer.kv_connector_module_path = "MultiConnector", None
        transfer.kv_connector_extra_config = {
            "connectors": [child, {"kv_connector": "Sibling", "kv_role": "kv_both"}]
        }
    return config


def scheduler_of(config: Any) -> Any:
    hash_fn = get_hash_fn_by_name(HASH)
    init_none_hash(hash_fn)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=kv_config(SHAPE),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        structured_output_manager=StructuredOutputManager(config),
        log_stats=True,
    )
    scheduler.add_request(make_request(SPEC, get_request_block_hasher(BLOCK, hash_fn)))
    return scheduler


def test_alone_a_request_waits_for_its_disk(scheduler: Any) -> None:
    waiting = scheduler(has_sibling=False)
    for _ in range(3):
        assert waiting.schedule().total_num_scheduled_tokens == 0
    assert waiting.requests["r"].status.name == "WAITING"


def test_a_request_loads_a_siblings_chunks_at_once(scheduler: Any) -> None:
    waiting = scheduler(has_sibling=True)
    waiting.schedule()
    assert Sibling.given == [2 * BLOCK]
    assert waiting.requests["r"].status.name == "WAITING_FOR_REMOTE_KVS"


@pytest.mark.parametrize("has", [0, None], ids=["has nothing", "waits itself"])
def test_a_request_waits_for_its_disk_with_a_sibling_without_tokens(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, has: int | None
) -> None:
    monkeypatch.setattr(Sibling, "has", has)
    waiting = scheduler(has_sibling=True)
    for _ in range(3):
        assert waiting.schedule().total_num_scheduled_tokens == 0
    assert waiting.requests["r"].status.name == "WAITING"
    monkeypatch.setattr(Sibling, "has", 2 * BLOCK)
    waiting.schedule()
    assert Sibling.given == [2 * BLOCK], "must accept the sibling's tokens once they are available"


def test_a_request_of_a_prefill_server_is_left_to_the_sibling(scheduler: Any) -> None:
    waiting = scheduler(has_sibling=False)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=2,
        extra_args={"kv_transfer_params": {"do_remote_prefill": True}},
    )
    first = waiting.requests["r"]
    first.sampling_params, first.kv_transfer_params = (
        params,
        params.extra_args["kv_transfer_params"],
    )
    assert waiting.schedule().total_num_scheduled_tokens > 0, (
        "the request must compute tokens that no load provides"
    )
