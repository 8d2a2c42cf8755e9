"""Types that the scheduler side and the worker side share, without torch, vLLM or the extension."""
