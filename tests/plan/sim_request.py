"""A symbolic engine's settings and requests."""

from dataclasses import dataclass, field
from typing import Any

from plan_store import item_content

from kvloft.plan import Answer, Offer, Wait
from kvloft.seam.views import EmbedRows, MediaItem, RequestView


@dataclass(frozen=True)
class Setup:
    block_tokens: int = 4
    num_blocks: int = 40
    num_frames: int = 64
    with_disk: bool = False
    num_ranks: int = 1
    run_ahead: bool = False
    """True for async scheduling, which schedules the next step before the results of this step
    arrive.
    """
    num_drafts: int = 0
    local_cache: bool = True
    fail_policy: bool = False
    max_running: int = 8
    wait_s: float = 5.0
    save_prompts_only: bool = False
    lookahead: int = 0
    draft_limit: int | None = None


@dataclass(eq=False)
class Request:
    """vLLM's Request, which is also the `LiveRequest` that kvloft receives."""

    req_id: Any
    token_ids: list[int]
    max_tokens: int
    adapter: tuple[str, str] | None = None
    salt: str | None = None
    rows: dict[int, str] = field(default_factory=dict)
    items: tuple[MediaItem, ...] = ()
    savable_tokens: int | None = None
    skip_load: bool = False
    saves: Any = None
    updates: list[list[int]] | None = None
    """Further input of a streaming session, or None for an ordinary request."""
    status: str = "waiting"
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    placeholders: int = 0
    in_flight: int = 0
    stale: int = 0
    drop_stale: bool = False
    spec: int = 0
    num_outputs: int = 0
    blocks: list[int] = field(default_factory=list)
    load: tuple[int, int] | None = None
    """The numbers of (local, external) tokens of the load that the request waits for."""
    history: list[Any] = field(default_factory=list)
    tainted: bool = False
    """True if the output cannot be compared, for example because the weights changed."""
    num_failed_loads: int = 0
    adapter_number: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.history = [list(self.token_ids)]

    def tokens(self) -> tuple[list[int], int]:
        return self.token_ids, self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def root(self) -> Any:
        return ("root", self.adapter, self.salt)

    def content(self, at: int) -> Any:
        token = (
            ("row", self.rows[at], "f16", 1) if at in self.rows else ("token", self.token_ids[at])
        )
        return token + tuple(
            item_content([(i.identifier, i.start, i.num_tokens) for i in self.items], at)
        )

    def contents(self) -> list[Any]:
        return [self.content(at) for at in range(self.num_tokens)]

    def view(self) -> RequestView:
        runs: list[EmbedRows] = []
        for at in sorted(self.rows):
            if runs and runs[-1].start + runs[-1].num_rows == at:
                last = runs.pop()
                runs.append(
                    EmbedRows(last.start, last.num_rows + 1, [*last.rows, self.rows[at]], "f16", 1)
                )
            else:
                runs.append(EmbedRows(at, 1, [self.rows[at]], "f16", 1))
        return RequestView(self.adapter, self.salt, tuple(runs), self.items, self.savable_tokens)

    def uses_adapter(self, number: int) -> bool:
        return self.adapter is not None and self.adapter_number == number


def tokens_of(answer: Answer) -> int | None:
    """Convert a result to vLLM's form: the number of tokens, or None for Wait."""
    if isinstance(answer, Wait):
        return None
    return answer.num_tokens if isinstance(answer, Offer) else 0
