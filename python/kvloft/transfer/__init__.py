"""The worker side: moves bytes between paged KV and frames, and never decides.

`layout` finds the pages, a mover (`cpu` or `cuda/`) copies and checks them, `worker` runs one step.
"""
