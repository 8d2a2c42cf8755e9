"""Objects shared by all parts of the scheduler side.

Calls to the KV event announcer are queued until the plan is complete, so that an error in KV events
cannot fail a plan or an admission.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from kvloft.plan.announcer import Announcer
from kvloft.plan.breaker import CircuitBreaker
from kvloft.plan.request_state import RequestState
from kvloft.plan.settings import PlanSettings
from kvloft.seam.ids import ReqId
from kvloft.seam.store import Session


class EventNotes:
    """Queues calls to the announcer until `take` returns them. Drops the calls if there is no
    announcer.
    """

    def __init__(self, announcer: Announcer | None) -> None:
        self.announcer = announcer
        self._notes: list[Callable[[], None]] = []

    def add_saves(self, requests: Iterable[RequestState]) -> None:
        """Queue a note for the units of each request's last planned save."""
        if (announcer := self.announcer) is not None:
            for request in requests:
                units = range(request.save_start, request.saved_units)
                self._notes.append(partial(announcer.note, request.live, request.chain, units))

    def add_states(self, request: RequestState, num_units: int) -> None:
        """Queue a note that the request has states after its first ``num_units`` units."""
        if (announcer := self.announcer) is not None:
            note = partial(announcer.note_states, request.live, request.chain, num_units)
            self._notes.append(note)

    def withdraw(self) -> None:
        """Stop KV events, because kvloft no longer offers tokens."""
        if self.announcer is not None:
            self.announcer.withdraw()

    def take(self) -> list[Callable[[], None]]:
        notes, self._notes = self._notes, []
        return notes


@dataclass(slots=True, eq=False)
class PlanContext:
    """The store, settings, requests and counters of a scheduler side."""

    store: Session
    settings: PlanSettings
    clock: Callable[[], float]
    breaker: CircuitBreaker
    notes: EventNotes
    has_siblings: bool = False
    """True if this connector is one of several children of MultiConnector."""
    requests: dict[ReqId, RequestState] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    """Counter increments since vLLM last read the statistics, by name (see `kvloft.vllm.stats`)."""
