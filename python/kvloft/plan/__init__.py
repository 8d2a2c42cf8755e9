"""The scheduler side decides which chunks are loaded and saved, and never touches KV bytes.

This package is pure Python and uses only types from ``kvloft.seam``. It does not import torch, vLLM
or the Rust extension, so tests can run it with a real or simulated engine. Plans are deterministic.
"""

from kvloft.plan.answers import Answer, Miss, Offer, Wait, WaitReason
from kvloft.plan.scheduler import SchedulerCore
from kvloft.plan.settings import PlanSettings

__all__ = ["Answer", "Miss", "Offer", "PlanSettings", "SchedulerCore", "Wait", "WaitReason"]
