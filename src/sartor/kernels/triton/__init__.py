"""The portable kernels, in Triton, and the pieces that two or more of them use unchanged."""
