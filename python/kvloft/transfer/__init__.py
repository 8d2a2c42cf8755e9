"""The worker half: moves bytes between paged KV and frames, and never decides.

``layout`` says where pages are, a mover (``cpu``; CUDA has its own) copies and proves them, ``worker`` runs one step.
"""
