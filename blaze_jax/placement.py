"""Where the modules' parameters live: split over the devices of a mesh as a `Parallelism` says, from the start."""

from collections.abc import Mapping

import jax
from jax import Array, P, lax
from jax.sharding import AbstractMesh, Mesh

from blaze_jax.config import MoEConfig
from blaze_jax.layer_over_devices import is_inside_shard_map
from blaze_jax.parallelism import Parallelism, names_of


def parts_here(parallel: Parallelism | None, config: MoEConfig, model_width: int, *, use_bias: bool) -> Mapping[str, P]:
    """Inside `jax.shard_map` over the axes of `parallel`, how each parameter is split; empty elsewhere."""
    if parallel is None or not is_inside_shard_map(parallel):
        return {}
    return parallel.specs(config, model_width, use_bias=use_bias)


def specs_at_rest(
    parallel: Parallelism | None, config: MoEConfig, model_width: int, *, use_bias: bool
) -> Mapping[str, P]:
    """How each parameter is split over its mesh or that of `jax.set_mesh`; empty without one and in `jax.shard_map`."""
    if parallel is None or mesh_of(parallel) is None or is_inside_shard_map(parallel):
        return {}
    return parallel.specs(config, model_width, use_bias=use_bias)


def mesh_of(parallel: Parallelism) -> Mesh | AbstractMesh | None:
    """The mesh that it was given, or that of `jax.set_mesh`; None where there is none."""
    mesh = parallel.mesh or jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names else None


def own_part(array: Array, spec: P) -> Array:
    """What this device has of an array that is split as `spec` says, inside `jax.shard_map`."""
    for dimension, axes in enumerate(spec):
        if names_of(axes):
            size = array.shape[dimension] // lax.axis_size(axes)
            array = lax.dynamic_slice_in_dim(array, lax.axis_index(axes) * size, size, dimension)
    return array
