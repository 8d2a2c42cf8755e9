"""The GPU's page mover: kernels, staging in HBM, and copies that no step waits for."""
