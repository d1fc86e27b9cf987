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
from jax._src.interpreters.partial_eval import DynamicJaxprTrace
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


def is_part_of_a_program() -> bool:
    """Whether jax traces a program around the caller; in an eager call it does not, even for a gradient or `vmap`."""
    trace = core.trace_ctx.trace
    while trace is not None and not isinstance(trace, DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


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
        arrays = vary_over(arrays, varying_axes(arrays))
        with config._check_vma(False):
            jaxpr, out = _traced(launch, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays))
        return out.unflatten(_launch.bind(*jax.tree.leaves(arrays), jaxpr=jaxpr, when_lowered=when_lowered))

    return call


def top_k(operand: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k`, on GPUs with the operand and the results laid out in rows.

    XLA's kernel for GPUs works on rows whatever the layout it is given: next to a transpose it gave wrong ids without
    complaint (jax 0.11.2). Elsewhere nothing is laid out, since `jax.export` cannot serialise a layout.
    """
    rows = Layout(tuple(range(operand.ndim)))

    def in_rows(operand):
        return tuple(with_layout_constraint(a, rows) for a in lax.top_k(with_layout_constraint(operand, rows), k))

    return lax.platform_dependent(
        operand, cuda=in_rows, rocm=in_rows, default=lambda operand: tuple(lax.top_k(operand, k))
    )


def when_lowered_unsplit(call: Callable[[int], None], integers: jax.Array) -> jax.Array:
    """`integers`; `call(devices)` where a program with them is lowered for several devices that share no manual axis.

    That is known only then: outside `jax.shard_map`, and inside one over some axes, a type need not tell of a mesh.
    """
    return _watched.bind(integers, lowered=call, raised=None)[0]


def has_symbolic_sizes(*arrays) -> bool:
    """Whether a size of any of `arrays` is symbolic, as in `jax.export` for any batch size."""
    return any(is_symbolic_dim(size) for array in jax.tree.leaves(arrays) for size in array.shape)


def undifferentiable(error: Callable[[], Exception], tree):
    """The arrays of `tree`, which raise `error()` where a function of them is differentiated, in whatever mode.

    `jax.custom_jvp` would do, but that jax 0.11 forgets its rule in the body of a scan that was differentiated once.
    """
    return jax.tree.map(lambda array: _watched.bind(array, lowered=None, raised=error)[0], tree)


def reverse_mode_token(error: Callable[[], Exception], *arrays: jax.Array) -> jax.Array:
    """An array without elements, which raises `error()` where `arrays` are differentiated in forward mode.

    Given to a `jax.custom_vjp` function before `arrays`, it speaks up before jax does. In reverse mode its tangent is
    transposed, to nothing, and never computed.
    """
    return _token.bind(*arrays, raised=error)[0]


def computed_if_used(full: Callable, reduced: Callable) -> Callable:
    """`full`, or `reduced` where a program uses only what `reduced` computes.

    jax removes what nobody uses, as in the first pass under `jax.checkpoint`, but not from inside loops and kernels.

    Args:
      full: function of arrays in any pytrees, to arrays in any.
      reduced: the same function of them, which computes only the last leaves of the result.
    """

    def call(*arrays):
        (jaxpr, out), (less, _) = _traced(full, arrays), _traced(reduced, arrays)
        return out.unflatten(_if_used.bind(*jax.tree.leaves(arrays), jaxpr=jaxpr, reduced=less))

    return call


def _traced(function: Callable, arrays: tuple) -> tuple[Any, Any]:
    """Returns the function as one of the leaves of `arrays`, and the structure of its result."""
    leaves, structure = jax.tree.flatten(arrays)
    jaxpr, out = jax.make_jaxpr(lambda *flat: function(*structure.unflatten(flat)), return_shape=True)(*leaves)
    return jaxpr, jax.tree.structure(out)


def _run(*arrays, jaxpr, **_):
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
        results = mlir.lower_fun(_run)(context, *operands, jaxpr=jaxpr)
    module = context.module_context
    client = module.backend  # where only the text was asked for, it may be of another platform
    if not when_lowered or client is None or client.platform not in ("gpu", "cuda"):
        return results
    operation = results[0].owner  # a block, if the program chooses by platform which kernel it runs
    if getattr(operation, "name", "") != "stablehlo.custom_call" or module.lowering_parameters.for_export:
        return results
    inputs, outputs = map(_shapes_of, (operation.operands, operation.results))
    if inputs is not None and outputs is not None:
        kernel = {a.name: a.attr for a in operation.attributes["mhlo.backend_config"]}
        attributes = {name: getattr(a, "value_bytes", None) or a.value for name, a in kernel.items()}
        device = (client.local_devices() or client.devices())[0]
        launch = jax.ffi.ffi_call(operation.attributes["call_target_name"].value, outputs, has_side_effect=True)
        program = jax.jit(lambda *arrays: launch(*arrays, **attributes))
        placed = [a.update(sharding=jax.sharding.SingleDeviceSharding(device)) for a in inputs]
        when_lowered(attributes["kernel_hash"], lambda: program.lower(*placed).compile())
    return results


_KERNEL_DTYPES = (jnp.bool, jnp.int8, jnp.int32, jnp.int64, jnp.uint32, jnp.float16, jnp.bfloat16, jnp.float32)


def _shapes_of(values) -> list[jax.ShapeDtypeStruct] | None:
    """Shapes and dtypes of values of a lowered program; None if a dtype is no kernel's of ours."""
    dtypes = {str(mlir.dtype_to_ir_type(jnp.dtype(dtype))): dtype for dtype in _KERNEL_DTYPES}
    if any(str(value.type.element_type) not in dtypes for value in values):
        return None
    return [jax.ShapeDtypeStruct(value.type.shape, dtypes[str(value.type.element_type)]) for value in values]


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
    full, reduced = equation.params["jaxpr"], equation.params["reduced"]
    optional = len(full.out_avals) - len(reduced.out_avals)
    if not any(used_outputs) and not full.effects:
        return [False] * len(equation.invars), None
    if optional and not any(used_outputs[:optional]):
        params = {"jaxpr": reduced, "reduced": reduced}
        equation = equation.replace(outvars=equation.outvars[optional:], params=params, effects=reduced.effects)
    return [True] * len(equation.invars), equation


def _batch_if_used(arrays, axes, *, jaxpr, reduced):
    outs = computed_if_used(*(jax.vmap(jaxpr_as_fun(each), in_axes=axes) for each in (jaxpr, reduced)))(*arrays)
    return outs, [0] * len(outs)


def _lower_watched(context, array, *, lowered, raised):
    where = context.module_context.axis_context
    if lowered is None:
        return [array]
    if isinstance(where, ShardingContext):
        devices = where.num_devices
    else:
        devices = math.prod(where.mesh.shape[axis] for axis in set(where.mesh.axis_names) - where.manual_axes)
    if devices > 1:
        lowered(devices)
    return [array]


def _no_elements(*_, **__):
    return [jnp.zeros(0, jnp.float32)]


# `checkify` calls the rules of primitives with an argument of its own called `error`, so that none of theirs can be.
def _raise(*_, raised, **__):
    raise raised()


def _token_jvp(arrays, tangents, *, raised):
    tangents = [t for t in tangents if not isinstance(t, ad.Zero)]
    return _token.bind(*arrays, raised=raised), _tangent_of_token.bind(*tangents, raised=raised)


def _transpose(_, *tangents, raised):
    return [ad.Zero(t.aval) if ad.is_undefined_primal(t) else None for t in tangents]


def _primitive(name: str, run: Callable, types: Callable, batch: Callable, lower: Callable | None = None) -> Primitive:
    """Returns an operation: what it computes, types and effects of that, its rule for `vmap`, and how it is lowered."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(run)
    primitive.def_effectful_abstract_eval(types)
    mlir.register_lowering(primitive, lower or mlir.lower_fun(run))
    batching.primitive_batchers[primitive] = batch
    return primitive


_if_used = _primitive(
    "computed_if_used", _run, lambda *_, jaxpr, reduced: (jaxpr.out_avals, jaxpr.effects), _batch_if_used
)
partial_eval.dce_rules[_if_used] = _remove_unused

_launch = _primitive("kernel_launch", _run, _results_vary, _batch_launch, _lower_launch)

_watched = _primitive(
    "watched",
    run=lambda array, **_: [array],
    types=lambda array, **_: ([array], frozenset()),
    batch=lambda arrays, axes, **watch: (_watched.bind(*arrays, **watch), axes),
    lower=_lower_watched,
)
ad.primitive_jvps[_watched] = _raise


def _types_of_token(*_, **__):
    return [ShapedArray((0,), jnp.float32)], frozenset()


_token = _primitive(
    "reverse_mode_token",
    _no_elements,
    _types_of_token,
    batch=lambda arrays, _, raised: (_token.bind(*arrays, raised=raised), [None]),
)
ad.primitive_jvps[_token] = _token_jvp
_tangent_of_token = _primitive("tangent_of_reverse_mode_token", _raise, _types_of_token, _raise, _raise)
ad.primitive_jvps[_tangent_of_token] = _raise
ad.primitive_transposes[_tangent_of_token] = _transpose
