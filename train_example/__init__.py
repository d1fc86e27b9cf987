"""A byte-level Mixture-of-Experts language model, trained with `blaze_jax`: `python -m train_example`."""
