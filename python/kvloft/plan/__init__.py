"""The scheduler side: decides which chunks are loaded and saved, and never touches KV bytes.

Pure Python on top of the types in ``kvloft.seam``: it imports neither torch, vLLM nor the Rust
extension, so tests can drive it with a real or a simulated engine. Equal events produce equal
plans.
"""

from kvloft.plan.answers import Answer, Miss, Offer, Wait, WaitReason
from kvloft.plan.scheduler import SchedulerCore
from kvloft.plan.settings import PlanSettings

__all__ = ["Answer", "Miss", "Offer", "PlanSettings", "SchedulerCore", "Wait", "WaitReason"]
