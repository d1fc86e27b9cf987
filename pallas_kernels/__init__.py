"""Compute kernels of a Mixture-of-Experts layer: arrays in, arrays out.

Nothing here knows of Flax, of autodiff rules or of routing policy. Every operation exists in a portable form in
`pallas_kernels.xla`, which runs wherever XLA does; faster forms have the same signatures.
"""
