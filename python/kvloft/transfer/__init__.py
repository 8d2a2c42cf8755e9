"""The worker side copies chunks between paged KV and frames, as planned by the scheduler side.

`layout` finds the pages, a mover (`cpu` or `cuda/`) copies and verifies them, and `worker` executes
each step's plan.
"""
