"""The GPU mover uses kernels and staging slots in HBM. GPU copies never block a step."""
