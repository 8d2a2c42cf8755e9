"""Objects that every part of the scheduler side uses."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvloft.plan.breaker import CircuitBreaker
from kvloft.plan.event_notes import EventNotes
from kvloft.plan.request_state import RequestState
from kvloft.plan.settings import PlanSettings
from kvloft.seam.ids import ReqId
from kvloft.seam.store import Session


@dataclass(slots=True, eq=False)
class PlanContext:
    """The store, the requests and the counters."""

    store: Session
    settings: PlanSettings
    clock: Callable[[], float]
    breaker: CircuitBreaker
    notes: EventNotes
    requests: dict[ReqId, RequestState] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    """By the names in ``kvloft.vllm.stats``, since vLLM last took the statistics."""
