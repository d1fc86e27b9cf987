"""Measures the layer and its peers on the machine at hand: `python -m blaze_jax.benchmark`."""
