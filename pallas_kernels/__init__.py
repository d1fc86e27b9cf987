"""Compute kernels of a Mixture-of-Experts layer: arrays in, arrays out.

Nothing here knows of Flax, of autodiff rules or of routing policy. `family` says what a family of kernels offers, and
`contract` has the types that their operations share.

- `xla`: the portable family, which runs wherever XLA does and whose docstrings define every operation.
- `hopper`: the family for NVIDIA Hopper, and its kernels with tensor cores.
- `ampere`: the family for every NVIDIA GPU since Ampere, and its kernels with tensor cores.
- `routing`: router, dispatch, combine and token selection for every NVIDIA GPU since Ampere.
- `simt`: the language that `routing` and `ampere` are written in, one value per thread.
- `mosaic`: foundations of all kernels in Pallas Mosaic GPU.
- `tuning`: free parameters of the kernels, and how they are found.
- `traced_once`: one trace, and so one kernel, for all equal calls.
- `compat`: what differs between releases of jax, or is not part of its documented interface.
- `compile_only`: compiling for GPUs that need not be there.
"""
