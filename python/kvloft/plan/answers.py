"""Answers of the scheduler side to vLLM's question how many tokens of a request it can load."""

from dataclasses import dataclass
from enum import Enum


class WaitReason(Enum):
    """Why vLLM must call again in its next step."""

    SHARED_LOAD = "another request is already loading this prefix"
    SLOTS = "running requests and loads in progress fill vLLM's running slots"
    TURN = "requests ahead pin as much host memory as waiting requests may"
    DISK = "chunks are being read from disk"
    BLOCKS = "too few GPU blocks for this load and those in progress"
    FAILED_LOAD = "the request's load failed, and requests behind it may need its blocks"


@dataclass(frozen=True, slots=True)
class Offer:
    """``num_tokens`` after the local tokens can be loaded now."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is offered yet: ask again in the next step."""

    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing is offered: compute the request."""


Answer = Offer | Wait | Miss
