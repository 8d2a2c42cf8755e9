"""Property test: applies engine events to SchedulerCore in random order and checks invariants I1 to
I10 after each event.

The oracle is the symbolic engine. Every saved frame is compared with the KV of its key's prefix,
and the tokens of every finished request are compared with a run without a cache. At the end, every
request must have finished, and no pin, ticket or tracker may remain.
"""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sim_checks import settle
from sim_engine import SymbolicEngine
from sim_request import Request, Setup

from kvloft.seam.views import MediaItem

STORIES = ([0] * 60, [1, 0, 2, 1, 1] * 12, [1, 0, 2, 1, 0] * 12, [2, 2, 0, 1, 2, 0, 1] * 9)
"""Prompts are prefixes of a few stories, so that prompts share prefixes.

The second story and the third story diverge at position 4.
"""

seeds = st.integers(0, 1 << 16).map(Random)
chances = st.sampled_from([0.0, 0.1, 0.5])


def dress(request: Request, flavour: str, more: list[int], engine: SymbolicEngine) -> Request:
    """Vary a request: add key inputs such as a salt, skip loads, or make it a session."""
    length = request.num_tokens
    if flavour == "salt":
        request.salt = "pepper"
    elif flavour == "adapter":
        request.adapter = ("lora", "/lora")
    elif flavour == "no load":
        request.skip_load = True
    elif flavour == "item":
        request.items = (MediaItem(f"image{length % 2}", length // 3, max(1, length // 2)),)
    elif flavour == "rows":
        request.rows = {at: f"row{at % 3}" for at in range(length) if at % 7 > 2}
        request.token_ids = [
            0 if at in request.rows else token for at, token in enumerate(request.token_ids)
        ]
        request.history = [list(request.token_ids)]
    elif flavour == "session" and length < 18 and not engine.setup.num_drafts:
        request.updates = [more[:4]] if length % 2 else []
    return request


def can_feed(session: Request) -> bool:
    """Return True if the session can grow further and still fit into the smallest pool."""
    return session.status != "finished" and not session.updates and session.num_tokens <= 30


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    num_drafts = draw(st.sampled_from([0, 0, 2, 3]))
    return Setup(
        block_tokens=draw(st.sampled_from([2, 4])),
        num_blocks=draw(st.sampled_from([36, 44, 60])),
        num_frames=draw(st.sampled_from([3, 8, 24, 200])),
        with_disk=draw(st.booleans()),
        num_ranks=draw(st.sampled_from([1, 1, 2])),
        run_ahead=draw(st.booleans()),
        num_drafts=num_drafts,
        local_cache=draw(st.booleans()),
        fail_policy=draw(st.sampled_from([False, False, True])),
        lookahead=draw(st.sampled_from([0, 0, 1])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    engine: SymbolicEngine

    @initialize(setup=setups())
    def start(self, setup: Setup) -> None:
        self.engine = SymbolicEngine(setup)
        self.num_arrived = 0

    @rule(
        story=st.sampled_from(range(len(STORIES))),
        length=st.integers(1, 34),
        max_tokens=st.integers(1, 14),
        flavour=st.sampled_from(
            ["plain"] * 6 + ["salt", "adapter", "rows", "item", "no load", "session", "session"]
        ),
        more=st.lists(st.integers(0, 2), min_size=1, max_size=9),
    )
    def arrive(
        self, story: int, length: int, max_tokens: int, flavour: str, more: list[int]
    ) -> None:
        request = Request(f"r{self.num_arrived}", STORIES[story][:length], max_tokens)
        self.num_arrived += 1
        self.engine.add(dress(request, flavour, more, self.engine))

    @precondition(lambda self: self.engine.can_schedule())
    @rule(budget=st.sampled_from([1, 3, 7, 16, 1000]), rng=seeds, fussy=chances)
    def schedule(self, budget: int, rng: Random, fussy: float) -> None:
        self.engine.schedule(budget, rng, fussy=fussy)

    @precondition(lambda self: self.engine.can_execute())
    @rule(rng=seeds, slow=st.booleans())
    def execute(self, rng: Random, slow: bool) -> None:
        num_ranks = self.engine.setup.num_ranks
        self.engine.execute(rng, [rng.randrange(4) for _ in range(num_ranks)] if slow else None)

    @precondition(lambda self: self.engine.can_update())
    @rule()
    def update(self) -> None:
        self.engine.update()

    @rule(num_steps=st.integers(1, 4), budget=st.sampled_from([5, 1000]))
    def run_on(self, num_steps: int, budget: int) -> None:
        self.engine.run(num_steps, budget)

    @precondition(lambda self: self.engine.requests)
    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        living = [r for r in self.engine.requests.values() if r.status != "finished"]
        if living:
            self.engine.finish(living[which % len(living)], aborted=True)

    @rule(
        which=st.integers(0, 5),
        update=st.lists(st.integers(0, 2), min_size=1, max_size=9) | st.none(),
    )
    def feed_session(self, which: int, update: list[int] | None) -> None:
        sessions = [r for r in self.engine.requests.values() if r.updates is not None]
        if sessions and can_feed(session := sessions[which % len(sessions)]):
            self.engine.feed_session(session, update)

    @rule(with_connector=st.booleans())
    def reset(self, with_connector: bool) -> None:
        self.engine.reset_prefix_cache(with_connector=with_connector)

    @precondition(lambda self: not self.engine.setup.local_cache)
    @rule()
    def swap_weights_hot(self) -> None:
        self.engine.swap_weights_hot()

    @rule(num_reads=st.integers(0, 3), fail=st.sampled_from([False, False, False, True]))
    def disk(self, num_reads: int, fail: bool) -> None:
        self.engine.store.tick(num_reads, fail=fail)

    @rule(seconds=st.sampled_from([0.1, 3.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.engine.now += seconds

    @rule(count=st.integers(1, 4))
    def frames_run_out(self, count: int) -> None:
        self.engine.store.drop_next = count

    @rule(which=st.integers(0, 50))
    def frame_goes_bad(self, which: int) -> None:
        keys = sorted(self.engine.store.entries)
        if keys:
            self.engine.workers.corrupt.add(keys[which % len(keys)])

    @rule(rate=st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    def saves_fail(self, rate: float) -> None:
        self.engine.failure_rate = rate

    @rule(broken=st.sampled_from([False, False, True]))
    def mover_breaks(self, broken: bool) -> None:
        self.engine.workers.broken = broken

    @rule()
    def step_cannot_be_read(self) -> None:
        self.engine.unreadable_step = True

    @rule()
    def no_request_waits_for_ever(self) -> None:
        """Even with a hung disk and hung loads, each waiting request gets a result within its wait
        limit if vLLM keeps calling `get_num_new_matched_tokens`.
        """
        engine = self.engine
        crowd = [
            r
            for r in engine.waiting
            if r.num_computed_tokens == 0 and r.status in ("waiting", "preempted")
        ]
        answers: dict[str, int | None] = {}
        for _ in range(4):
            for request in crowd:
                local = len(engine._local_hit(request)) * engine.setup.block_tokens
                answers[request.req_id] = engine._ask(request, local, Random(0), 0.0)
            engine.core._admission.begin_step()
            engine.now += engine.setup.wait_s * 0.6
        assert None not in answers.values(), "a request has to wait longer than its limit"

    @invariant()
    def all_invariants(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.store.drop_next = 0
        self.engine.failure_rate = 0.0
        settle(self.engine)


SchedulerMachine.TestCase.settings = settings(stateful_step_count=60)
TestSchedulerMachine = SchedulerMachine.TestCase
