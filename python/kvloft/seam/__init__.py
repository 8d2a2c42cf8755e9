"""Values and protocols that the scheduler side and the worker side share. Must not import torch,
vLLM or the extension.
"""
