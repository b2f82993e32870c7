"""Triton pieces that two or more kernels use unchanged."""
