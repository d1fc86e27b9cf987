"""All that differs between jax releases, or is not yet part of its documented interface, in one place."""

import math
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
from jax import lax
from jax._src import config, core
from jax._src.core import InconclusiveDimensionOperation as InconclusiveDimensionOperation  # not in `jax.core`
from jax._src.pallas import mpmd
from jax._src.sharding_impls import ShardingContext
from jax.core import ShapedArray
from jax.experimental.layout import Layout, with_layout_constraint
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

launch_with_aliases = mpmd._mpmd_map
"""`plgpu.kernel` for results that take the memory of operands; waits for aliases in the public form."""

INLINE_WHILE_TRACING: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True
"""The value of `jax.jit(inline=)` for a function that leaves no call in a program; True inlines later in jax 0.12."""


def varying_axes(*arrays) -> frozenset[str]:
    """Mesh axes of an enclosing `jax.shard_map` over which any of `arrays` differs from device to device."""
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(arrays)))


def is_traced() -> bool:
    """Whether it is called by a function that jax traces."""
    return not core.trace_state_clean()


def axes_of_vmap() -> frozenset[str]:
    """Mesh axes over which an enclosing `vmap` splits its examples, explicitly or as `spmd_axis_name` says."""
    environment = core.get_axis_env()
    return environment.spmd_axis_names | environment.explicit_mesh_axis_names


def vary_over(tree, axes: frozenset[str]):
    """Marks every array of `tree` as varying over the mesh `axes`; the transpose sums its gradient over them.

    Inside `shard_map`, a replicated weight next to sharded tokens needs this once, and a loop's initial value needs it
    to have the type of what the loop writes. Outside `shard_map`, `axes` is empty and nothing happens.
    """

    def vary(array):
        missing = tuple(sorted(axes - varying_axes(array)))
        return lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(vary, tree)


def kernel_launch(launch: Callable, when_lowered: Callable[[bytes, Callable[[], Any]], None] | None = None) -> Callable:
    """`launch`, a function of arrays, as one operation of jax's: a kernel, or what interprets one.

    Where `jax.shard_map` checks over which axes values vary, all results vary as the arrays do together: jax's own
    check knows no kernels.

    Args:
      launch: from arrays in any pytrees to arrays in any.
      when_lowered: is called with `(hash, compile)` where a program with the kernel is lowered for a GPU, not for
        `jax.export`; `compile()` compiles the kernel in a program of its own. Waits for jaxlib to assemble the kernels
        of a program in parallel.
    """

    def call(*arrays):
        if when_lowered is None and not config._check_vma.value:
            return launch(*arrays)
        leaves, structure = jax.tree.flatten(vary_over(arrays, varying_axes(arrays)))
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves]
        with config._check_vma(False):
            jaxpr, out = jax.make_jaxpr(lambda *flat: launch(*structure.unflatten(flat)), return_shape=True)(*shapes)
        results = _launch.bind(*leaves, jaxpr=jaxpr, when_lowered=when_lowered)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return call


def top_k(operand: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k`, on GPUs with the operand and the results laid out in rows.

    XLA's kernel for GPUs works on rows whatever the layout it is given: next to a transpose it gave wrong ids without
    complaint (jax 0.11.2). Elsewhere nothing is laid out, since `jax.export` cannot serialise a layout.
    """
    rows = Layout(tuple(range(operand.ndim)))

    def in_rows(operand):
        values, ids = lax.top_k(with_layout_constraint(operand, rows), k)
        return with_layout_constraint(values, rows), with_layout_constraint(ids, rows)

    def as_it_is(operand):
        values, ids = lax.top_k(operand, k)
        return values, ids

    return lax.platform_dependent(operand, cuda=in_rows, rocm=in_rows, default=as_it_is)


def when_lowered_unsplit(call: Callable[[int], None], integers: jax.Array) -> jax.Array:
    """`integers`; `call(devices)` where a program with them is lowered for several devices that share no manual axis.

    That is known only then: outside `jax.shard_map`, and inside one over some axes, a type need not tell of a mesh.
    """
    return _lowered.bind(integers, call=call)


def has_symbolic_sizes(*arrays) -> bool:
    """Whether a size of any of `arrays` is symbolic, as in `jax.export` for any batch size."""
    return any(is_symbolic_dim(size) for array in jax.tree.leaves(arrays) for size in array.shape)


def undifferentiable(error: Callable[[], Exception], tree):
    """The arrays of `tree`, which raise `error()` where a function of them is differentiated, in whatever mode.

    `jax.custom_jvp` would do, but that jax 0.11 forgets its rule in the body of a scan that was differentiated once.
    """
    return jax.tree.map(lambda array: _undifferentiable.bind(array, raised=error), tree)


def reverse_mode_token(error: Callable[[], Exception], *arrays: jax.Array) -> jax.Array:
    """An array without elements, which raises `error()` where `arrays` are differentiated in forward mode.

    Given to a `jax.custom_vjp` function before `arrays`, it speaks up before jax does. In reverse mode its tangent is
    transposed, to nothing, and never computed.
    """
    return _token.bind(*arrays, raised=error)


def computed_if_used(full: Callable, reduced: Callable) -> Callable:
    """`full`, or `reduced` where a program uses only what `reduced` computes.

    jax removes what nobody uses, as in the first pass under `jax.checkpoint`, but not from inside loops and kernels.

    Args:
      full: function of arrays in any pytrees, to arrays in any.
      reduced: the same function of them, which computes only the last leaves of the result.
    """

    def call(*arrays):
        leaves, structure = jax.tree.flatten(arrays)

        def traced(function):
            return jax.make_jaxpr(lambda *flat: function(*structure.unflatten(flat)), return_shape=True)(*leaves)

        (jaxpr, out), (less, _) = traced(full), traced(reduced)
        return jax.tree.unflatten(jax.tree.structure(out), _if_used.bind(*leaves, full=jaxpr, reduced=less))

    return call


def _run_full(*arrays, full, reduced):
    return jaxpr_as_fun(full)(*arrays)


def _run_launch(*arrays, jaxpr, when_lowered):
    return jaxpr_as_fun(jaxpr)(*arrays)


def _results_vary(*arrays, jaxpr, when_lowered):
    of, varying = arrays[0].sharding, arrays[0].manual_axis_type

    def result(aval):
        return aval.update(sharding=of.update(spec=jax.P(*(None,) * aval.ndim)), manual_axis_type=varying)

    return [result(aval) for aval in jaxpr.out_avals], jaxpr.effects


def _batch_launch(arrays, axes, *, jaxpr, when_lowered):
    outs = kernel_launch(jax.vmap(jaxpr_as_fun(jaxpr), in_axes=axes), when_lowered)(*arrays)
    return outs, [0] * len(outs)


def _lower_launch(context, *operands, jaxpr, when_lowered):
    with _assembler_version_remembered():
        results = mlir.lower_fun(_run_launch)(context, *operands, jaxpr=jaxpr, when_lowered=None)
    module = context.module_context
    client = module.backend  # where only the text was asked for, it may be of another platform
    if not when_lowered or client is None or client.platform not in ("gpu", "cuda"):
        return results
    operation = results[0].owner
    if operation.name == "stablehlo.custom_call" and not module.lowering_parameters.for_export:
        kernel = {a.name: a.attr for a in operation.attributes["mhlo.backend_config"]}
        attributes = {name: getattr(a, "value_bytes", None) or a.value for name, a in kernel.items()}
        device = (client.local_devices() or client.devices())[0]
        inputs, outputs = (list(map(_shape_of, values)) for values in (operation.operands, operation.results))
        launch = jax.ffi.ffi_call(operation.attributes["call_target_name"].value, outputs, has_side_effect=True)
        program = jax.jit(lambda *arrays: launch(*arrays, **attributes))
        placed = [a.update(sharding=jax.sharding.SingleDeviceSharding(device)) for a in inputs]
        when_lowered(attributes["kernel_hash"], lambda: program.lower(*placed).compile())
    return results


def _shape_of(value) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a value of a lowered program."""
    dtypes = {str(mlir.dtype_to_ir_type(jnp.dtype(name))): name for name in _KERNEL_DTYPES}
    return jax.ShapeDtypeStruct(value.type.shape, dtypes[str(value.type.element_type)])


_KERNEL_DTYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint32",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)


@contextmanager
def _assembler_version_remembered():
    """Lets jaxlib 0.11 ask NVIDIA's assembler for its version once and not for every truth value that a kernel uses.

    It starts a process for each answer, 500 of them and 4 s of 7 for the kernels of a layer. jaxlib 0.12 remembers.
    """
    try:
        from jax._src.lib.mosaic_gpu import _mosaic_gpu_ext as extension  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:  # without jax's CUDA plugin nothing asks
        extension = None
    if extension is None or jaxlib.version.__version_info__ >= (0, 12):
        yield
        return
    ask = extension._get_ptxas_isa_version
    extension._get_ptxas_isa_version = _REMEMBERED.setdefault(ask, cache(ask))
    try:
        yield
    finally:
        extension._get_ptxas_isa_version = ask


_REMEMBERED: dict[Callable, Callable] = {}


def _remove_unused(used_outputs, *live_inputs_and_equation):  # jax 0.11 says nothing of live inputs
    equation = live_inputs_and_equation[-1]
    full, reduced = equation.params["full"], equation.params["reduced"]
    optional = len(full.out_avals) - len(reduced.out_avals)
    if not any(used_outputs) and not full.effects:
        return [False] * len(equation.invars), None
    if optional and not any(used_outputs[:optional]):
        params = {"full": reduced, "reduced": reduced}
        equation = equation.replace(outvars=equation.outvars[optional:], params=params, effects=reduced.effects)
    return [True] * len(equation.invars), equation


def _batch_if_used(arrays, axes, *, full, reduced):
    both = (jax.vmap(jaxpr_as_fun(jaxpr), in_axes=axes) for jaxpr in (full, reduced))
    outs = computed_if_used(*both)(*arrays)
    return outs, [0] * len(outs)


def _lower_and_tell(context, array, *, call):
    where = context.module_context.axis_context
    if isinstance(where, ShardingContext):
        devices = where.num_devices
    else:
        devices = math.prod(where.mesh.shape[axis] for axis in set(where.mesh.axis_names) - where.manual_axes)
    if devices > 1:
        call(devices)
    return [array]


def _no_elements(*_, **__):
    return jnp.zeros(0, jnp.float32)


# `checkify` calls the rules of primitives with an argument of its own called `error`, so that none of theirs can be.
def _raise(*_, raised, **__):
    raise raised()


def _token_jvp(arrays, tangents, *, raised):
    tangents = [t for t in tangents if not isinstance(t, ad.Zero)]
    return reverse_mode_token(raised, *arrays), _tangent_of_token.bind(*tangents, raised=raised)


def _transpose(_, *tangents, raised):
    return [ad.Zero(t.aval) if ad.is_undefined_primal(t) else None for t in tangents]


_if_used = Primitive("computed_if_used")
_if_used.multiple_results = True
_if_used.def_impl(_run_full)
_if_used.def_effectful_abstract_eval(lambda *_, full, reduced: (full.out_avals, full.effects))
mlir.register_lowering(_if_used, mlir.lower_fun(_run_full))
batching.primitive_batchers[_if_used] = _batch_if_used
partial_eval.dce_rules[_if_used] = _remove_unused

_launch = Primitive("kernel_launch")
_launch.multiple_results = True
_launch.def_impl(_run_launch)
_launch.def_effectful_abstract_eval(_results_vary)
mlir.register_lowering(_launch, _lower_launch)
batching.primitive_batchers[_launch] = _batch_launch

_undifferentiable = Primitive("undifferentiable")
_undifferentiable.def_abstract_eval(lambda array, **_: array)
_undifferentiable.def_impl(lambda array, **_: array)
mlir.register_lowering(_undifferentiable, lambda _, array, **__: [array])
ad.primitive_jvps[_undifferentiable] = _raise
batching.primitive_batchers[_undifferentiable] = lambda arrays, axes, raised: (
    undifferentiable(raised, arrays[0]),
    axes[0],
)

_lowered = Primitive("when_lowered_unsplit")
_lowered.def_abstract_eval(lambda array, **_: array)
_lowered.def_impl(lambda array, **_: array)
mlir.register_lowering(_lowered, _lower_and_tell)
batching.primitive_batchers[_lowered] = lambda arrays, axes, call: (when_lowered_unsplit(call, *arrays), *axes)

_token, _tangent_of_token = Primitive("reverse_mode_token"), Primitive("tangent_of_reverse_mode_token")
for _primitive in (_token, _tangent_of_token):
    _primitive.def_abstract_eval(lambda *_, **__: ShapedArray((0,), jnp.float32))
_token.def_impl(_no_elements)
mlir.register_lowering(_token, mlir.lower_fun(_no_elements, multiple_results=False))
ad.primitive_jvps[_token] = _token_jvp
batching.primitive_batchers[_token] = lambda arrays, _, raised: (reverse_mode_token(raised, *arrays), None)
_tangent_of_token.def_impl(_raise)
mlir.register_lowering(_tangent_of_token, _raise)
ad.primitive_jvps[_tangent_of_token] = _raise
ad.primitive_transposes[_tangent_of_token] = _transpose
batching.primitive_batchers[_tangent_of_token] = _raise
