"""Results of a match: how many tokens of a waiting request vLLM can load."""

from dataclasses import dataclass
from enum import Enum


class WaitReason(Enum):
    """Reasons for which vLLM must ask again in its next step."""

    SHARED_LOAD = "another request is already loading this prefix"
    SLOTS = "running requests and loads in progress fill vLLM's running slots"
    TURN = "requests ahead pin as much host memory as waiting requests may"
    DISK = "chunks are being read from disk"
    BLOCKS = "too few GPU blocks for this load and the loads in progress"
    FAILED_LOAD = "the request's load failed, and requests behind it may need its blocks"


@dataclass(frozen=True, slots=True)
class Offer:
    """The next ``num_tokens`` after the local tokens can be loaded now."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is offered yet, and vLLM must ask again in its next step."""

    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing is offered, and vLLM computes the request."""


Answer = Offer | Wait | Miss
