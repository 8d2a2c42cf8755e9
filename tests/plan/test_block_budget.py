"""Checks the tracked block needs of loading requests against a full recount."""

from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from kvloft import _core
from kvloft.plan.load_gates import BlockBudget, BlockNeed
from kvloft.plan.request_state import RequestState
from kvloft.plan.settings import PoolSize
from kvloft.seam.ids import ReqId
from kvloft.seam.shape import GroupShape

GROUPS = (GroupShape(4), GroupShape(4, kind="window", reach=8), GroupShape(4, kind="state"))
CHAINS = []
for first in (1, 2):
    CHAINS.append(_core.KeyChain(_core.root_key(bytes(32), None, None), block_tokens=4))
    CHAINS[-1].append_tokens([first] * 400, 0, 400)

requests = st.tuples(
    st.integers(0, 5), st.integers(0, 1), st.integers(1, 90), st.integers(0, 90), st.booleans()
)


def asked(chain: _core.KeyChain, local_tokens: int) -> RequestState:
    return cast(RequestState, SimpleNamespace(chain=chain, local_tokens=local_tokens))


def num_taken(needs: dict[ReqId, BlockNeed]) -> int:
    shared = {stride for need in needs.values() for stride in need.shared.items()}
    return sum(need.own for need in needs.values()) + sum(num_blocks for _, num_blocks in shared)


def num_shared(need: BlockNeed) -> int:
    return sum(need.shared.values())


@given(st.lists(requests, max_size=30), st.integers(10, 200))
def test_taken_blocks_are_released_and_shared_blocks_count_once(
    calls: list[tuple[int, int, int, int, bool]], size: int
) -> None:
    budget, needs = BlockBudget(GROUPS, PoolSize(size, step_tokens=16)), dict[ReqId, BlockNeed]()
    for number, chain, loaded, local, takes in calls:
        req_id, local_tokens, loaded_tokens = (
            ReqId(f"r{number}"),
            local * 2 // 4 * 4,
            local * 2 + loaded * 4,
        )
        need = budget.need(asked(CHAINS[chain], local_tokens), loaded_tokens + 5, loaded_tokens)
        others = {other: its for other, its in needs.items() if other != req_id}
        assert budget.release(req_id) == (needs.pop(req_id, None) is not None)
        assert budget.fits(need) == (not others or num_taken({**others, req_id: need}) <= size)
        if takes:
            budget.take(req_id, need)
            needs[req_id] = need


def test_a_request_needs_all_its_full_attention_blocks_except_those_in_the_step() -> None:
    budget = BlockBudget(GROUPS, PoolSize(100, step_tokens=16))
    need = budget.need(asked(CHAINS[0], 40), 100, 80)
    assert need.own == (26 - 10) + (2 + (8 + 16) // 4) + 3
    assert num_shared(need) == 10


def test_draft_tokens_of_two_steps_and_the_columns_of_states_for_them_count() -> None:
    """Async scheduling has two steps in flight, and each step has draft tokens."""
    pool = PoolSize(100, step_tokens=16, num_drafts=3)
    full, states = BlockBudget(GROUPS[:1], pool), BlockBudget(GROUPS[2:], pool)
    need = full.need(asked(CHAINS[0], 0), 97, 80)
    assert need.own == 26, "97 tokens, the next token and six draft tokens"
    assert states.need(asked(CHAINS[0], 0), 97, 80).own == 3 + 3


def test_all_blocks_of_a_shared_chunk_count_with_different_sizes() -> None:
    groups = (GroupShape(2, 2), GroupShape(4), GroupShape(1, 4, kind="window", reach=8))
    need = BlockBudget(groups, PoolSize(200, step_tokens=16)).need(asked(CHAINS[0], 40), 100, 80)
    assert need.own == (26 - 10) + (51 - 20) + (2 + 8 + 16)
    assert num_shared(need) == 10 + 20
