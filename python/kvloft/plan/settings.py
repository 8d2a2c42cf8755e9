"""Settings of the scheduler side: values that do not change while an engine runs."""

from dataclasses import dataclass

from kvloft.plan.breaker import RETRY_S
from kvloft.seam.shape import ArenaSpec, CacheShape


@dataclass(frozen=True, slots=True)
class PoolSize:
    """vLLM's block pool. ``step_tokens``: at most this many tokens are in steps at the same time.
    ``num_drafts``: draft tokens per step and request.
    """

    num_blocks: int
    step_tokens: int
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Every rank of ``shape`` reports each ticket and load once; only then is it settled (I10)."""

    shape: CacheShape
    arena: ArenaSpec | None = None
    """The host arena at the start; None while there is no store."""
    wait_s: float = 10.0
    """A request waits at most this long for the disk, or for another request's load."""
    loads_allowed: bool = True
    saves_allowed: bool = True
    shares_blocks: bool = False
    """vLLM's prefix cache is on, so requests can share the blocks that a load fills."""
    retry_loads_s: float = RETRY_S
    """Pause after many failed loads; infinite if loads are not retried."""
    save_prompts_only: bool = False
    """Default for requests that do not specify what to save."""
    max_running: int | None = None
    """vLLM's running slots; None if unknown."""
    draft_limit: int | None = None
    """With a request of more tokens in a step, the engine runs that step without its draft model.
    None if there is no draft model with such a limit.
    """
    pool: PoolSize | None = None
    """vLLM's block pool, if loads must leave blocks for each other (several KV cache groups)."""
