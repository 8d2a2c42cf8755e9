"""Helpers for the trap tests: a prompt, and functions that run a request and look up its chunks."""

from collections.abc import Iterable
from typing import cast

import pytest
from sim_engine import SymbolicEngine
from sim_request import Request

from kvloft.seam.batch import Tables
from kvloft.seam.ids import BlockId

PROMPT = [1, 0, 2, 1, 1, 0, 2, 2, 1, 0, 1, 1, 2, 0, 0, 1, 2, 1]
both_modes = pytest.mark.parametrize("run_ahead", [False, True])


def stored(engine: SymbolicEngine, request: Request, num_tokens: int | None = None) -> int:
    """Return how many tokens of the request's prefix a new request would find."""
    chain = engine.book.new_chain(request.view())
    for item in request.items:
        chain.add_item(item.identifier, item.start, item.num_tokens)
    for content in request.contents()[:num_tokens]:
        if content[0] == "row":
            chain.append_embeds([content[1]], dtype="f16", width=1)
        else:
            chain.append_tokens([content[1]])
    return engine.store.lookup(chain)[0] * engine.setup.block_tokens


def tables(block_ids: Iterable[int]) -> Tables:
    """Return the block tables for an engine with one group."""
    return Tables([cast(list[BlockId], list(block_ids))])


def serve(engine: SymbolicEngine, request: Request, budget: int = 1000) -> Request:
    engine.add(request)
    for _ in range(200):
        if request.status == "finished":
            break
        engine.run(1, budget)
        engine.check()
    engine.drain()
    assert request.status == "finished"
    return request


def whole_blocks(num_tokens: int, size: int = 4) -> int:
    return num_tokens - num_tokens % size
