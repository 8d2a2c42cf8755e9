"""GPU mover: kernels, staging slots in HBM, and copies that never block a step."""
