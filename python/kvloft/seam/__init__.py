"""Values of both sides. Must not import torch, vLLM or the extension."""
