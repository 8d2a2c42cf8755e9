"""Defines the results of `match`: an offer of tokens to load, a wait, or a miss."""

from dataclasses import dataclass
from enum import Enum


class WaitReason(Enum):
    """Why a request must wait."""

    SHARED_LOAD = "another request is already loading this prefix"
    SLOTS = "running requests and loads in progress fill vLLM's running slots"
    TURN = "requests ahead pin all of the host memory that waiting requests may pin"
    DISK = "chunks are being read from disk"
    BLOCKS = "too few GPU blocks for this load and the loads in progress"
    FAILED_LOAD = "the request's load failed, and requests behind it may need its blocks"


@dataclass(frozen=True, slots=True)
class Offer:
    """The next ``num_tokens`` after the local tokens can be loaded now."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is offered yet. vLLM calls `match` again in its next step."""

    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing is offered, so vLLM computes the tokens."""


Answer = Offer | Wait | Miss
