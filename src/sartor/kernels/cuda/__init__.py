"""Device-side shelves that the CUDA kernels share, and the text they are generated with."""
