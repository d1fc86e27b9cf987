"""The release, apart from the package so that a build need not import jax."""

__version__ = "0.1.0"
