"""Checks kvloft in a symbolic engine: visible frames, plans, held resources and output tokens."""

from typing import Any

from sim_request import Request

from kvloft.seam.plan import LoadPlan, StepPlan


def check_visible(engine: Any, key: bytes, content: Any) -> None:
    """Check I1, I2, I3 and I7: on every rank, a visible chunk must contain its prefix's KV."""
    prefix = engine.book.prefix_of[key]
    expected = engine.workers.expected(prefix)[-engine.setup.block_tokens :]
    assert content is not None, "I3: visible, but never written"
    assert sorted(content) == list(range(engine.setup.num_ranks)), (
        "I3: visible before every rank wrote it"
    )
    for rank, (written, payload) in content.items():
        assert written == key
        assert payload == expected, f"I1: rank {rank} saved KV of a different prefix"
    engine.num_saved_blocks += 1


def check_plan(engine: Any, plan: StepPlan) -> None:
    for save in plan.saves:
        request = engine.requests[save.req_id]
        for copy in save.chunks:
            entry = engine.store.tickets[copy.ticket]
            assert (entry.frame, entry.key, 1) == (copy.frame, copy.key, copy.num_blocks)
            unit = len(engine.book.prefix_of[entry.key]) // engine.setup.block_tokens - 1
            assert list(copy.blocks) == request.blocks[unit : unit + 1], (
                "I6: saved from blocks that do not exist"
            )
            assert 0 not in copy.blocks, "I6: saved the null block"
    for load in plan.loads:
        assert load.load_id not in engine.load_ids, "I10: one load planned twice"
        engine.load_ids.add(load.load_id)
        check_load(engine, load)


def check_load(engine: Any, load: LoadPlan) -> None:
    request = engine.requests[load.req_id]
    assert request.status in ("loading", "finished")
    assert request.load is not None
    local, external = request.load
    size = engine.setup.block_tokens
    promised = request.blocks[local // size : (local + external) // size]
    named = [block for copy in load.chunks for block in copy.blocks] + list(load.lost)
    assert named == promised, "I6: a load does not cover exactly its blocks"
    assert not load.lost, "a load lost a pinned chunk"


def reference(engine: Any, request: Request) -> list[int]:
    """Return all tokens that this request must have when it finishes, computed without any
    cache.
    """
    token_ids: list[int] = list(request.history[0])
    for turn in [*request.history[1:], (request.num_outputs, None)]:
        for _ in range(turn[0]):
            probe = Request(
                "probe", token_ids, 1, request.adapter, request.salt, request.rows, request.items
            )
            symbols = engine.workers.expected([request.root, *probe.contents()])
            token_ids = [*token_ids, engine.workers.symbols.sample(symbols[-1])]
        if turn[1] is not None:
            token_ids = token_ids[:-1] + turn[1]
    return token_ids


def check_held(engine: Any) -> None:
    """Check I5, I8 and the outputs of finished requests. The tests call this after every rule."""
    engine.store.check()
    leases = sum(tracker.lease is not None for tracker in engine.core._requests.values())
    assert len(engine.store.open_leases) <= leases + len(engine.core._loads.in_progress), (
        "I5: a lease without an owner"
    )
    turns = engine.core._admission.turns
    waiting = {
        tracker.lease for tracker in engine.core._requests.values() if tracker.lease is not None
    }
    assert turns.waiting.leases.keys() == waiting
    assert all(engine.core._requests[lease.req_id].lease is lease for lease in waiting)
    assert (turns.waiting.num_units == 0) == (not waiting)
    assert set(engine.store.tickets) == set(engine.store.in_flight.left), (
        "I5: a reservation without an owner"
    )
    for request in engine.finished:
        if not request.tainted:
            assert request.token_ids == reference(engine, request), "a wrong token"
    engine.finished.clear()


def settle(engine: Any) -> None:
    """Run until all requests have finished, and check that all resources are released (I5)."""
    for request in list(engine.requests.values()):
        if request.updates is not None and request.status != "finished":
            engine.feed_session(request, None)
    for turn in range(600):
        if turn % 100 == 99:  # sessions can block each other until a user ends a session
            holders = [r for r in engine.waiting if r.updates is not None and r.blocks]
            if holders:
                engine.finish(holders[0], aborted=True)
        if not engine.requests and not engine.core.has_work_in_flight:
            break
        engine.run()
        engine.check()
    else:
        raise AssertionError(f"stuck: {[(r.req_id, r.status) for r in engine.requests.values()]}")
    engine.drain()
    engine.check()
    assert not engine.store.open_leases
    assert not engine.store.tickets
    core = engine.core
    in_flight = engine.store.in_flight
    unsettled = (in_flight.left, in_flight.blocks, in_flight.failed)
    for left in (
        *unsettled,
        core._requests,
        core._loads.in_progress,
        core._admission.turns.waiting.leases,
        core._admission.turns.loading.leases,
        core._admission.waiting,
        core._admission.gates.incoming,
        core._loads.queued,
    ):
        assert not left, f"left behind: {left}"
    assert (
        core._admission.turns.waiting.num_units == core._admission.turns.loading.num_units == 0
    ), "pins are still counted"
    assert len(engine.pool.free) == engine.setup.num_blocks - 1
