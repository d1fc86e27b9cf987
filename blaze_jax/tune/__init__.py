"""Finds the fastest parameters of the kernels for NVIDIA GPUs on the GPU at hand: `python -m blaze_jax.tune --help`."""
