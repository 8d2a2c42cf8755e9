"""Scheduler-side settings, which do not change while an engine runs."""

from dataclasses import dataclass

from kvloft.seam.shape import ArenaSpec, CacheShape


@dataclass(frozen=True, slots=True)
class PoolSize:
    """vLLM's block pool size, and limits on the number of scheduled tokens.

    ``step_tokens`` is the maximum number of tokens across all in-flight steps. ``num_drafts`` is
    the number of draft tokens per request and step.
    """

    num_blocks: int
    step_tokens: int
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """One engine's scheduler-side settings.

    A ticket or load is settled once all ``shape.num_ranks`` ranks have reported it (I10).
    """

    shape: CacheShape
    arena: ArenaSpec | None = None
    """The host arena at startup, or None if the store is not available yet."""
    wait_s: float = 10.0
    """Maximum time in seconds that a request waits for the disk or another request's load."""
    loads_allowed: bool = True
    saves_allowed: bool = True
    shares_blocks: bool = False
    """True if vLLM's prefix cache is enabled, so requests can share the blocks of a load."""
    save_prompts_only: bool = False
    """True if generated tokens are not saved by default. A request can override this setting."""
    max_running: int | None = None
    """Maximum number of requests that vLLM runs concurrently, or None if it is unknown."""
    draft_limit: int | None = None
    """Maximum request length, in tokens, at which the engine runs the draft model in every step.
    None without a draft model or a limit.
    """
    pool: PoolSize | None = None
    """vLLM's block pool, or None if concurrent loads cannot exhaust it (one KV cache group)."""

    @property
    def has_draft_kv(self) -> bool:
        """Return True if vLLM stores a draft model's KV."""
        return bool(self.shape.lookahead) or self.draft_limit is not None
