"""Where the modules' parameters live: split over the devices of a mesh as a `Parallelism` says, from the start."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax import Array, P, lax
from jax.sharding import AbstractMesh, Mesh

from blaze_jax.config import MoEConfig
from blaze_jax.layer_program import is_inside_shard_map
from blaze_jax.parallelism import Parallelism, names_of


class Placement(NamedTuple):
    """How the parameters of a module are split, by name.

    Attributes:
      parts: inside `jax.shard_map` over the axes of a `Parallelism`, where each device makes its part; empty elsewhere.
      specs: elsewhere, over the mesh of the `Parallelism` or that of `jax.set_mesh`; empty without one.
    """

    parts: Mapping[str, P]
    specs: Mapping[str, P]


def placement_of(
    parallel: Parallelism | None, config: MoEConfig, model_width: int, *, use_bias: bool = False
) -> Placement:
    """Where the parameters of `config.parameters(model_width)` belong.

    Raises:
      ValueError: the mesh lacks an axis, or the devices along one do not divide what it splits.
    """
    inside = parallel is not None and is_inside_shard_map(parallel)
    if parallel is None or not (inside or mesh_of(parallel)):
        return Placement({}, {})
    specs = parallel.specs(config, model_width, use_bias=use_bias)
    return Placement(specs, {}) if inside else Placement({}, specs)


def mesh_of(parallel: Parallelism) -> Mesh | AbstractMesh | None:
    """The mesh that it was given, or that of `jax.set_mesh`; None without one."""
    mesh = parallel.mesh or jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names else None


def own_part(array: Array, spec: P) -> Array:
    """What this device has of an array that is split as `spec` says, inside `jax.shard_map`."""
    for dimension, axes in enumerate(spec):
        if names_of(axes):
            size = array.shape[dimension] // lax.axis_size(axes)
            array = lax.dynamic_slice_in_dim(array, lax.axis_index(axes) * size, size, dimension)
    return array
