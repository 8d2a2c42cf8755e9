"""Tests, without a GPU, that the equality check reports every wrong token and page."""

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from batches import batch_of, batch_of_groups

from benches.gpu.audit import PageAudit, poison
from benches.gpu.equality import REFERENCE, problems, summary
from benches.gpu.kept import KeptBlocks
from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ChunkKey, ReqId
from kvloft.seam.plan import LoadPlan, LoadResult, SavePlan
from kvloft.transfer.mover import Finished


def run(tokens: list[list[int]], **audit: int) -> dict[str, Any]:
    counts = (
        dict.fromkeys(
            ("saved", "loaded", "loaded_differing", "resaved", "resaved_differing", "unknown"), 0
        )
        | audit
    )
    return {
        "tokens": tokens,
        "preemptions": 1,
        "moved": {"loaded_bytes": 5, "bad_chunks": 0},
        "audit": counts,
    }


def good() -> dict[str, Any]:
    tokens = [[1, 2], [3, 4]]
    warm = {
        "cold": run(tokens),
        "warm": run(tokens, loaded=3),
        "skipped_load": run([[9], [9]], loaded=3, loaded_differing=3),
    }
    return {
        REFERENCE: {"phases": {"prompts": {"cold": {**run(tokens), "audit": {}}}}},
        "hnd": {
            "phases": {
                "prompts": warm,
                "crowd": {"cold": run(tokens), "warm": run(tokens, loaded=1)},
            }
        },
    }


def test_nothing_wrong_is_no_problem() -> None:
    found = good()
    found[REFERENCE]["phases"]["crowd"] = {"cold": {**run([[1, 2], [3, 4]]), "audit": {}}}
    assert problems(found) == []
    assert summary(found)["setups"]["hnd"]["runs"][0]["equal"] == 2


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "tokens differ": lambda runs: runs["warm"].update(tokens=[[1, 2], [3, 5]]),
    "loaded pages differ or are unknown": lambda runs: runs["warm"]["audit"].update(
        loaded_differing=1
    ),
    "recomputed pages differ": lambda runs: runs["cold"]["audit"].update(resaved_differing=1),
    "nothing was loaded": lambda runs: runs["warm"]["audit"].update(loaded=0),
    "tokens do not depend on the loaded KV": lambda runs: runs["skipped_load"].update(
        tokens=[[1, 2], [3, 4]]
    ),
    "the audit compared nothing": lambda runs: runs["skipped_load"]["audit"].update(
        loaded_differing=0
    ),
    "tags failed": lambda runs: runs["warm"]["moved"].update(bad_chunks=1),
}


@pytest.mark.parametrize("problem", WRONG)
def test_each_wrong_is_named(problem: str) -> None:
    found = deepcopy(good())
    WRONG[problem](found["hnd"]["phases"]["prompts"])
    assert any(problem in text for text in problems(found))


def test_an_engine_that_failed_or_never_preempted_is_a_problem() -> None:
    found = good()
    for row in found["hnd"]["phases"]["crowd"].values():
        row["preemptions"] = 0
    for row in found["hnd"]["phases"]["prompts"].values():
        row["preemptions"] = 0
    assert any("preempted" in text for text in problems(found | {"nhd": {"error": "x"}}))
    assert "nhd: x" in problems(found | {"nhd": {"error": "x"}})


class CopyingMover:
    """Clones saved blocks and copies them back synchronously when they are loaded.

    ``spoil`` corrupts loaded pages.
    """

    def __init__(self, kv: list[torch.Tensor]) -> None:
        self.kv, self.kept, self.done, self.spoil = kv, {}, Finished(), False

    def submit_saves(self, plans: list[SavePlan]) -> None:
        for copy in (copy for plan in plans for copy in plan.chunks):
            self.kept[copy.key] = [layer[list(copy.blocks)].clone() for layer in self.kv]

    def submit_loads(self, plans: list[LoadPlan]) -> None:
        for plan in plans:
            for copy in plan.chunks:
                for layer, pages in zip(self.kv, self.kept[copy.key], strict=True):
                    layer[list(copy.blocks)] = pages + self.spoil
            self.done.loads.append(LoadResult(plan.req_id, plan.load_id))

    def poll(self) -> Finished:
        done, self.done = self.done, Finished()
        return done


def test_the_audit_sees_spoiled_skipped_and_unknown_pages() -> None:
    kv = [torch.zeros(8, 2, 4), torch.zeros(8, 3, 4)]
    poison(kv, 1)
    mover = CopyingMover(kv)
    audit = PageAudit(mover, kv)
    chunks = [ChunkCopy(i, ChunkKey(bytes([i]) * 32), 1, 0, (BlockId(i),)) for i in range(3)]
    mover.submit_saves([SavePlan(ReqId("r"), batch_of(chunks))])

    def load(number: int) -> dict[str, int]:
        moved = tuple(copy._replace(blocks=(BlockId(copy.blocks[0] + 4),)) for copy in chunks)
        mover.submit_loads([LoadPlan(ReqId("r"), number, batch_of(moved))])
        assert [result.load_id for result in mover.poll().loads] == [number]
        return audit.take_counts()

    counts = load(1)
    assert (counts["saved"], counts["loaded"], counts["loaded_differing"]) == (3, 3, 0)
    mover.spoil = True
    assert load(2)["loaded_differing"] == 3
    poison(kv, 2)
    audit.skip_loads = True
    assert load(3)["loaded_differing"] == 3
    audit.skip_loads = mover.spoil = False
    audit.forget()
    assert load(4)["unknown"] == 3


def test_groups_that_were_not_loaded_and_unequal_numbers_of_blocks_are_problems() -> None:
    found = good()
    found[REFERENCE]["phases"]["crowd"] = {"cold": {**run([[1, 2], [3, 4]]), "audit": {}}}
    row = found["hnd"]["phases"]["prompts"]["warm"]
    row["audit"] |= {"loaded_0": 2, "loaded_1": 1}
    found["groups"] = found.pop("hnd") | {"kv_groups": 2, "kv_blocks": 10}
    found[REFERENCE]["kv_blocks"] = 10
    assert problems(found) == []
    del row["audit"]["loaded_1"]
    assert any("not every KV cache group" in text for text in problems(found))
    row["audit"]["loaded_1"] = 1
    found[REFERENCE]["kv_blocks"] = 40
    assert any("different numbers" in text for text in problems(found))


def test_the_audit_looks_at_the_pages_of_a_chunks_own_group() -> None:
    kv = [torch.zeros(8, 2, 4), torch.zeros(8, 3, 4)]
    poison(kv, 1)
    mover = CopyingMover(kv[:1])  # the second group's pages are not loaded
    audit = PageAudit(mover, kv[:1], kv[1:])
    chunks = [
        batch_of([ChunkCopy(i, ChunkKey(bytes([i]) * 32), 1, 0, (BlockId(i),))]) for i in range(2)
    ]
    batches = batch_of_groups((nth, list(chunk)) for nth, chunk in enumerate(chunks))
    mover.submit_saves([SavePlan(ReqId("r"), batches)])
    poison(kv, 2)
    mover.submit_loads([LoadPlan(ReqId("r"), 1, batches)])
    assert mover.poll().loads
    counts = audit.take_counts()
    assert (counts["saved_0"], counts["saved_1"], counts["loaded_0"], counts["loaded_1"]) == (
        1,
        1,
        1,
        1,
    )
    assert counts["loaded_differing"] == 1


def kept() -> dict[str, Any]:
    """Return the results of the `kept` phase for an engine with two groups and without
    batch-invariant kernels.
    """
    told = {
        "kept": {"same_0": 5, "same_1": 1},
        "cached": [0, 32, 64],
        "cached_hbm": [0, 32, 64],
        "block_tokens": 32,
        "kv_groups": 2,
    }
    first, hbm, none = [[1], [2], [3]], [[1], [2], [4]], [[1], [8], [9]]
    warm = run(hbm, loaded=6, loaded_0=5, loaded_1=1) | told
    skipped = run(none, loaded=6, loaded_differing=6) | told
    runs = {
        "cold": run(first) | told,
        "hbm": run(hbm) | told,
        "warm": warm,
        "skipped_load": skipped,
    }
    return {"flash-groups": {"kv_groups": 2, "phases": {"kept": runs}}}


WRONG_KEPT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "differ from the pages in vLLM's own cache": lambda warm: warm["kept"].update(differing_1=1),
    "only 1 KV cache groups were compared": lambda warm: warm["kept"].pop("same_1"),
    "fewer cached tokens": lambda warm: warm.update(cached=[0, 32, 31]),
    "too few prompts": lambda warm: warm.update(cached=[0, 0, 32]),
    "tokens differ from the tokens with": lambda warm: warm.update(tokens=[[1], [7], [4]]),
}


@pytest.mark.parametrize("problem", WRONG_KEPT)
def test_differences_from_vllms_own_cache_are_named(problem: str) -> None:
    found = kept()
    assert problems(found) == []
    WRONG_KEPT[problem](found["flash-groups"]["phases"]["kept"]["warm"])
    assert any(problem in text for text in problems(found))


def test_token_differences_with_more_cached_tokens_are_rounding() -> None:
    found = kept()
    found["flash-groups"]["phases"]["kept"]["warm"].update(
        tokens=[[1], [2], [5]], cached=[0, 32, 96]
    )
    assert problems(found) == []


def test_pages_are_compared_with_vllms_by_block_hash() -> None:
    blocks = [SimpleNamespace(block_id=i, block_hash=None) for i in range(6)]
    engine: Any = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace(blocks=blocks))
    )
    engine = SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=engine))
    )
    groups = [[torch.zeros(6, 2, 4)], [torch.zeros(6, 3), torch.zeros(6, 5, dtype=torch.bfloat16)]]
    poison([kv for group in groups for kv in group], 1)
    kept = KeptBlocks(engine, groups)
    blocks[1].block_hash, blocks[2].block_hash = (
        b"prefix" + group.to_bytes(4, "big") for group in (0, 1)
    )
    assert kept.note() == 2
    for group, (source, to) in enumerate([(1, 3), (2, 4)]):
        for kv in groups[group]:
            kv[to] = kv[source]
        blocks[to].block_hash, blocks[source].block_hash = (
            blocks[source].block_hash,
            b"another" + group.to_bytes(4, "big"),
        )
    assert kept.compare([(0, 3), (1, 4), (0, 1), (0, 5)]) == {
        "same_0": 1,
        "same_1": 1,
        "unnamed": 2,
    }
    groups[1][1][4, 2] += 1
    assert kept.compare([(0, 3), (1, 4)]) == {"same_0": 1, "differing_1": 1}
    assert kept.compare([(1, 3)]) == {"unnamed": 1}, "stored under a different group's name"
