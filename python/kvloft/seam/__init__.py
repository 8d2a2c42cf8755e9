"""Types shared by both sides. This package does not import torch, vLLM or the extension."""
