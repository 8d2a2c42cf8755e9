"""Types shared by the scheduler and worker sides of the connector.

This package does not import torch, vLLM or the extension.
"""
