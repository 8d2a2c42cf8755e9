"""The scheduler side: decides which chunks are loaded and saved, and never touches bytes.

Pure Python over the seams in ``kvloft.seam``: no torch, vLLM or Rust extension, so that tests can
drive it with any engine, real or symbolic. Equal events lead to equal plans.
"""

from kvloft.plan.answers import Answer, Miss, Offer, Wait, WaitReason
from kvloft.plan.scheduler import SchedulerCore
from kvloft.plan.settings import PlanSettings

__all__ = ["Answer", "Miss", "Offer", "PlanSettings", "SchedulerCore", "Wait", "WaitReason"]
