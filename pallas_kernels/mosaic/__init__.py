"""Foundations of all kernels in Pallas Mosaic GPU.

`row_groups` cuts rows by expert into tiles, `launches` runs kernels on a GPU and has them assembled early,
`interpreter` runs them on any machine and finds races, `jaxprs` brings functions of jax into them, and `device` is the
GPU, what none of them can do, and when they are slow.
"""
