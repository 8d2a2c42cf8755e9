"""Room in vLLM's pool for requests with loads, against a count that is made anew each time."""

from hypothesis import given
from hypothesis import strategies as st

from kvloft import _core
from kvloft.plan.room import Need, Room
from kvloft.seam.ids import ReqId
from kvloft.seam.shape import GroupShape

GROUPS = (GroupShape(4), GroupShape(4, kind="window", reach=8), GroupShape(4, kind="state"))
CHAINS = []
for first in (1, 2):
    CHAINS.append(_core.KeyChain(_core.root_key(bytes(32), None, None), block_tokens=4))
    CHAINS[-1].append_tokens([first] * 400, 0, 400)

requests = st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(1, 90), st.integers(0, 90), st.booleans())


def taken(needs: dict[ReqId, Need]) -> int:
    return sum(need.own for need in needs.values()) + sum(n for _, n in {s for need in needs.values() for s in need.shared})


@given(st.lists(requests, max_size=30), st.integers(10, 200))
def test_what_is_taken_is_given_back_and_shared_blocks_count_once(calls: list[tuple[int, int, int, int, bool]], size: int) -> None:
    room, needs = Room(GROUPS, size, step_tokens=16), dict[ReqId, Need]()
    for number, chain, loaded, local, takes in calls:
        req_id = ReqId(f"r{number}")
        need = room.need(CHAINS[chain], local * 2 + loaded * 4 + 5, local * 2 // 4 * 4, local * 2 + loaded * 4)
        others = {other: its for other, its in needs.items() if other != req_id}
        assert room.give_back(req_id) == (needs.pop(req_id, None) is not None)
        assert room.has(need) == (not others or taken({**others, req_id: need}) <= size)
        if takes:
            room.take(req_id, need)
            needs[req_id] = need


def test_a_request_needs_all_its_blocks_of_full_attention_but_those_of_the_window_and_of_the_step() -> None:
    room = Room(GROUPS, 100, step_tokens=16)
    own, shared = room.need(CHAINS[0], 100, 40, 80)
    assert own == (26 - 10) + (2 + (8 + 16) // 4) + 3
    assert sum(num_blocks for _, num_blocks in shared) == 10


def test_draft_tokens_of_two_steps_and_the_columns_of_states_for_them_count() -> None:
    """Async scheduling has two steps under way, and each of them drafts."""
    room, states = Room(GROUPS[:1], 100, step_tokens=16, num_drafts=3), Room(GROUPS[2:], 100, step_tokens=16, num_drafts=3)
    assert room.need(CHAINS[0], 97, 0, 80).own == 26, "97 tokens, the next one and six drafts"
    assert states.need(CHAINS[0], 97, 0, 80).own == 3 + 3


def test_where_blocks_differ_in_size_all_of_a_shared_chunk_count() -> None:
    room = Room((GroupShape(2, 2), GroupShape(4), GroupShape(1, 4, kind="window", reach=8)), 200, step_tokens=16)
    own, shared = room.need(CHAINS[0], 100, 40, 80)
    assert own == (26 - 10) + (51 - 20) + (2 + 8 + 16)
    assert sum(num_blocks for _, num_blocks in shared) == 10 + 20
