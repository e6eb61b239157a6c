"""The operations as Triton kernels for Hopper-class GPUs; each equals its plain torch function within stated bounds.

Products accumulate in float32. No kernel waits for the host or depends on data for its grid, so every step of a model
can be captured in a CUDA graph. Rows that are only padding have an index of -1 wherever they would be written.
"""
