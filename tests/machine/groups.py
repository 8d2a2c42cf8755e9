"""KV cache groups as in real models, and the positions that a token attends to in each kind of
group.

This module is the machine's model of vLLM, so it must import neither vLLM nor kvloft.
"""

from dataclasses import dataclass
from math import lcm
from typing import Literal


@dataclass(frozen=True)
class Group:
    """One KV cache group.

    ``size`` is the number of tokens in a window or a local chunk. ``layers`` contains layers of the
    target model, of a draft model, or of both. Draft layers are "draft" (EAGLE and MTP), "dflash"
    (DFlash) or "model" (a separate draft model).
    """

    kind: Literal["full", "window", "local", "state"] = "full"
    block_tokens: int = 4
    size: int = 0
    layers: tuple[str, ...] = ("target",)

    @property
    def is_draft(self) -> bool:
        return self.drafter is not None

    @property
    def drafter(self) -> str | None:
        """Return the kind of draft model that has layers in this group."""
        return next((layer for layer in self.layers if layer != "target"), None)

    def reads_from(self, position: int) -> int:
        """Return the first position that the token at ``position`` attends to."""
        if self.kind == "window":
            return max(0, position - self.size + 1)
        return position // self.size * self.size if self.kind == "local" else 0

    def needs_from(self, end: int) -> int:
        """Return the first position for which a hit of ``end`` tokens needs a block.

        For Mamba states, a hit needs only the last block.
        """
        return max(0, end - self.block_tokens) if self.kind == "state" else self.reads_from(end)


FULL, DRAFT, STATE, LONG = Group(), Group(layers=("draft",)), Group("state"), Group(block_tokens=8)
GROUPS: dict[str, tuple[Group, ...]] = {
    "drafter in the one group": (Group(layers=("target", "draft")),),
    "dflash in the one group": (Group(layers=("target", "dflash")),),
    "draft model in the one group": (Group(layers=("target", "model")),),
    "window": (FULL, Group("window", size=9)),
    "window of whole blocks": (FULL, Group("window", size=8)),
    "window before full": (Group("window", size=6), FULL),
    "window and drafter": (FULL, Group("window", size=10), DRAFT),
    "window and dflash": (FULL, Group("window", size=10), Group(layers=("dflash",))),
    "dflash with a window": (FULL, Group("window", size=10, layers=("target", "dflash"))),
    "window of the drafter, too": (
        FULL,
        Group("window", size=10),
        Group("window", size=6, layers=("draft",)),
    ),
    "four windows": (FULL, *(Group("window", size=6) for _ in range(4))),
    "six windows": (FULL, *(Group("window", size=size) for size in (5, 5, 9, 9, 13, 13))),
    "local": (FULL, Group("local", size=8)),
    "two locals": (FULL, Group("local", size=12), Group("local", size=12)),
    "state": (FULL, STATE),
    "three states": (FULL, STATE, STATE, STATE),
    "short window, long blocks": (LONG, Group("window", size=3)),
    "window of half blocks": (LONG, Group("window", size=9)),
    "windows from the midst of a chunk": (LONG, Group("window", size=11), Group("window", size=12)),
    "window of long blocks": (FULL, Group("window", block_tokens=8, size=11)),
    "window of longer blocks": (FULL, Group("window", block_tokens=6, size=10)),
    "two windows of different blocks": (
        Group("window", size=9),
        Group("window", block_tokens=8, size=18),
    ),
    "window of half blocks and drafter": (
        LONG,
        Group("window", size=10),
        Group(block_tokens=8, layers=("draft",)),
    ),
    "drafter of half blocks": (LONG, DRAFT),
    "window of half blocks and dflash": (
        Group(block_tokens=8, layers=("target", "dflash")),
        Group("window", size=10),
    ),
    "three sizes of blocks": (
        FULL,
        Group("window", block_tokens=6, size=10),
        Group("window", block_tokens=8, size=5),
    ),
    "state of two blocks": (FULL, Group("state", block_tokens=8)),
    "state and drafter": (FULL, STATE, DRAFT),
    "state, drafter with attention": (Group(layers=("target", "draft")), STATE, STATE),
    "state and dflash": (FULL, STATE, Group(layers=("dflash",))),
    "state, dflash with attention": (Group(layers=("target", "dflash")), STATE),
    "state and draft model": (FULL, STATE, Group(layers=("model",))),
    "states, draft model with attention": (Group(layers=("target", "model")), STATE, STATE),
    "one window": (Group("window", size=9),),
    "one short window": (Group("window", size=3),),
    "drafter in the one window": (Group("window", size=9, layers=("target", "draft")),),
    "two windows": (Group("window", size=9), Group("window", size=18)),
    "window and local": (Group("local", size=8), Group("window", size=6)),
    "window and state": (STATE, Group("window", size=6)),
    "seven": (FULL, Group("window", size=7), Group("window", size=7), STATE, STATE, STATE, DRAFT),
}
"""The groups of each model, including the groups of its draft model."""


def are_grouped(groups: tuple[Group, ...]) -> bool:
    """Return False if a hit consists simply of the first blocks of a single block table."""
    return len(groups) > 1 or groups[0].kind != "full"


def are_served(groups: tuple[Group, ...]) -> bool:
    """Return True if kvloft supports the groups.

    Unsupported groups serve only to validate the machine's model of vLLM.
    """
    kinds, sizes = {group.kind for group in groups}, {group.block_tokens for group in groups}
    return bool(kinds & {"full", "window"}) and (len(sizes) == 1 or kinds <= {"full", "window"})


def unit_tokens(groups: tuple[Group, ...]) -> int:
    """Return the number of tokens per unit. With multiple groups, hits end at unit boundaries."""
    return lcm(*(group.block_tokens for group in groups))


def lookahead(groups: tuple[Group, ...]) -> int:
    """Return the number of tokens after a block on which the block's KV depends.

    In DFlash and separate draft models, the KV at a position depends only on tokens up to that
    position.
    """
    return int(any("draft" in group.layers for group in groups))
