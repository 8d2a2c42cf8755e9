"""The GPU's page mover: kernels compiled where they run, a staging ring in HBM, and copies that no
step waits for.
"""
