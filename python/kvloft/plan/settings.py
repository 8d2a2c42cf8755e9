"""Settings of the scheduler side, which do not change while an engine runs."""

from dataclasses import dataclass

from kvloft.plan.breaker import RETRY_S
from kvloft.seam.shape import ArenaSpec, CacheShape


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Size of vLLM's block pool.

    ``step_tokens`` is the maximum number of tokens in all steps in flight, and ``num_drafts`` the
    number of draft tokens per step and request.
    """

    num_blocks: int
    step_tokens: int
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Settings of one scheduler side.

    A ticket or load is settled once each of the ``shape.num_ranks`` ranks has reported it (I10).
    """

    shape: CacheShape
    arena: ArenaSpec | None = None
    """The host arena at startup; None if no store is available yet."""
    wait_s: float = 10.0
    """Maximum time that a request waits for the disk, or for the load of another request."""
    loads_allowed: bool = True
    saves_allowed: bool = True
    shares_blocks: bool = False
    """True if vLLM's prefix cache is enabled, so that requests can share the blocks of a load."""
    retry_loads_s: float = RETRY_S
    """Pause after too many failed loads; infinite if loads are not retried."""
    save_prompts_only: bool = False
    """Default for requests that do not specify what to save."""
    max_running: int | None = None
    """Number of vLLM's running slots; None if unknown."""
    draft_limit: int | None = None
    """The engine skips the draft model in steps with a request of more tokens than this. None if
    there is no draft model with such a limit.
    """
    pool: PoolSize | None = None
    """vLLM's block pool, if loads must leave blocks for each other (multiple KV cache groups)."""
