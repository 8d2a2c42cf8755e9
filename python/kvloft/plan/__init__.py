"""The scheduler half: decides what is loaded and saved, and never touches bytes.

Pure Python over the seams in ``kvloft.seam``: no torch, no vllm, no Rust extension, so that it can be driven in tests
by any engine, real or symbolic. Same events, same plans.
"""

from kvloft.plan.core import SchedulerCore

__all__ = ["SchedulerCore"]
