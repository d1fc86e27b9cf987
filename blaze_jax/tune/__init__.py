"""Finds the fastest parameters of the Hopper kernels on the GPU at hand: `python -m blaze_jax.tune --help`."""
