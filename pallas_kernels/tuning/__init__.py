"""The free parameters of the kernels, and where tuned ones come from."""
