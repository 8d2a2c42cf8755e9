"""Values and seams that both halves share. Nothing here knows torch, vLLM or the Rust extension."""
