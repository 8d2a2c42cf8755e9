"""Defines the results of `match`: an offer of loadable tokens, a wait, or a miss."""

from dataclasses import dataclass
from enum import Enum


class WaitReason(Enum):
    """Why a request must wait."""

    SHARED_LOAD = "another request is already loading this prefix"
    SLOTS = "running requests and pending loads fill vLLM's running slots"
    TURN = "requests ahead already pin all the host memory that waiting requests may use"
    DISK = "chunks are being read from disk"
    BLOCKS = "too few free GPU blocks for this load and the pending loads"
    FAILED_LOAD = "the request's load failed, and later requests may need its blocks"


@dataclass(frozen=True, slots=True)
class Offer:
    """The ``num_tokens`` tokens after the local tokens can be loaded now."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is offered yet. vLLM calls `match` again in its next step."""

    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing is offered, so vLLM computes the tokens."""


Answer = Offer | Wait | Miss
