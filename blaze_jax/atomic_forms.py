"""The pairs of tokens with experts of one neuron, in three forms of equal results, and the gradient of all three.

With a token's experts e_k and their weights w_k, `h_k = x · u_k` and `y = Σ_k w_k · act(h_k) · v_k`. Backward, with dy
the gradient of y:

    dw_k = act(h_k) · (dy · v_k)     dh_k = w_k · act'(h_k) · (dy · v_k)     dx = Σ_k dh_k · u_k
    du_e = Σ dh_k · x     dv_e = Σ w_k · act(h_k) · dy, over the pairs of the expert

"dense" multiplies with every expert, where the weights of those that a token has not are zero. "grouped" takes a row of
the grid of experts as one expert of many neurons, for the kernels of such experts: a row's weights are to them a gate
that no matrix makes. "gathered" reads u and v of each pair, and sorts the pairs by expert for the gradients of these.
`choose_form` says which is to be the fastest.

All keep their inputs only, and compute a block of tokens at a time: no array has the pairs of all tokens times the
width of a token. Sums over blocks are wide.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from blaze_jax.activations import Gated
from blaze_jax.dispatch import group_by_expert
from blaze_jax.implementation import Implementation, choose_implementation, kernels_of
from blaze_jax.schedule import block_width, combine_columns
from blaze_jax.transformations import REVERSE_MODE_ONLY, differentiated_once
from pallas_kernels.compat import is_symbolic_dim, reverse_mode_token, vary_over, varying_axes
from pallas_kernels.contract import EMPTY_SLOT, Dispatch, accumulator_dtype, place_values
from pallas_kernels.family import Kernels
from pallas_kernels.xla.loops import empty, zeros

Form = Literal["dense", "grouped", "gathered"]

DENSE_EXPERTS = 1024
"""So many experts are computed densely: a row of their grid would be too narrow for a kernel's tile."""

PAIRS_OF_A_GATHER = 256
"""Computed pairs a pair up to which products are faster than gathering, on an H200: up to 256 they were at each size
measured, at 1024 not. `python -m blaze_jax.benchmark atomic` measures where the forms cross."""

_BLOCK_NUMBERS = 2**26
"""Numbers in the widest array of a block of tokens."""

_RUN, _RUNS = 64, 128
"""Pairs that one product sums by expert, and how many such products are made at a time."""


class Settings(NamedTuple):
    """How pairs are computed.

    Attributes:
      form: see the module.
      kernels: the family of the grouped products and of the combine.
      activation: the elementwise function of `x · u`.
    """

    form: Form
    kernels: Kernels
    activation: Callable[[Array], Array]


class Pairs(NamedTuple):
    """Tokens, or a block of them, and their experts.

    Attributes:
      x: `(T, d)`.
      weights: `(T, K)`, 0 in an empty slot.
      experts: `(T, K)` int32, distinct for a token; E in an empty slot.
    """

    x: Float[Array, "T d"]
    weights: Float[Array, "T K"]
    experts: Int[Array, "T K"]


class Neurons(NamedTuple):
    """u and v of all experts, in the dtype of the tokens; or what their gradients sum up to."""

    w_up: Float[Array, "E d"]
    w_down: Float[Array, "E d"]


def choose_form(num_experts: int, experts_per_token: int) -> Form:
    """The fastest form, by how many pairs it computes for each that there is."""
    if num_experts <= DENSE_EXPERTS:
        return "dense"
    computed = computed_pairs("grouped", num_experts, experts_per_token) / experts_per_token
    return "grouped" if computed <= PAIRS_OF_A_GATHER else "gathered"


def computed_pairs(form: Form, num_experts: int, experts_per_token: int) -> int:
    """The pairs that a form computes for a token, at most."""
    side = side_of(num_experts)
    return {"dense": num_experts, "grouped": min(experts_per_token, side) * side, "gathered": experts_per_token}[form]


def side_of(num_experts: int) -> int:
    """Rows, and columns, of the grid of experts."""
    return round(num_experts**0.5)


def compute_pairs(
    x: Float[Array, "T d"],
    w_up: Float[Array, "E d"],
    w_down: Float[Array, "E d"],
    weights: Float[Array, "T K"],
    experts: Int[Array, "T K"],
    *,
    activation: Callable[[Array], Array],
    form: Form | None,
    implementation: Implementation | None,
) -> Float[Array, "T d"]:
    """The sum of each token's experts, in the dtype of `x`; -1 marks an empty slot. The gradient is of all but the ids.

    u and v of another dtype are converted to that of `x`, as a whole.
    """
    num_experts, d = w_up.shape
    if x.shape[0] == 0:
        return x
    form = form or choose_form(num_experts, experts.shape[1])
    kernels = kernels_of("xla")
    if form != "dense":
        side = side_of(num_experts) if form == "grouped" else 8  # gathered rows go to the combine alone
        of_grid = (jax.ShapeDtypeStruct(shape, x.dtype) for shape in ((side, d, side), (side, side, d)))
        weights_of_grid: Any = tuple(of_grid)
        kernels = kernels_of(choose_implementation(implementation, x, weights_of_grid, ()), dtype=x.dtype)
    token = reverse_mode_token(REVERSE_MODE_ONLY, x, w_up, w_down, weights)
    arrays = Pairs(x, weights, jnp.where(experts == EMPTY_SLOT, num_experts, experts)), Neurons(w_up, w_down)
    return _output(Settings(form, kernels, activation), token, *vary_over(arrays, varying_axes(*arrays)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _output(settings: Settings, token, pairs: Pairs, neurons: Neurons) -> Float[Array, "T d"]:
    """The output; `token` raises where it is differentiated in forward mode."""
    return _compute_output(settings, pairs, neurons)


def _forward(settings: Settings, _, pairs: Pairs, neurons: Neurons):
    return _compute_output(settings, pairs, neurons), (pairs, neurons)


def _backward(settings: Settings, residuals, dy):
    return None, *_gradients(settings, *residuals, dy)


_output.defvjp(_forward, _backward)


@differentiated_once
def _compute_output(settings: Settings, pairs: Pairs, neurons: Neurons) -> Float[Array, "T d"]:
    narrow = _in_dtype_of(pairs.x, neurons)
    output, _ = _FORMS[settings.form]
    return _in_blocks(settings, lambda sums, block: (sums, output(settings, block, narrow)), (), neurons, pairs)[1]


@differentiated_once
def _gradients(settings: Settings, pairs: Pairs, neurons: Neurons, dy) -> tuple[Pairs, Neurons]:
    narrow = _in_dtype_of(pairs.x, neurons)
    _, gradients = _FORMS[settings.form]

    def step(sums: Neurons, block: Pairs, dy):
        dx, d_weights, sums = gradients(settings, block, narrow, dy, sums)
        return sums, (dx, d_weights)

    wide = accumulator_dtype(pairs.x.dtype)
    sums = Neurons(*(zeros(array.shape, wide, pairs, neurons, dy) for array in neurons))
    sums, (dx, d_weights) = _in_blocks(settings, step, sums, neurons, pairs, dy)
    d_pairs: Any = Pairs(dx, d_weights.astype(pairs.weights.dtype), None)  # pyright: ignore[reportArgumentType]
    return d_pairs, jax.tree.map(lambda total, array: total.astype(array.dtype), sums, neurons)


def _in_dtype_of(x: Array, neurons: Neurons) -> Neurons:
    return Neurons(*(array.astype(x.dtype) for array in neurons))


def _in_blocks(settings: Settings, step: Callable, sums, neurons: Neurons, pairs: Pairs, *others: Array):
    """`step(sums, pairs, *others)` of one block of tokens after the other: the last sums, and all tokens' results."""
    (num_tokens, slots), (num_experts, d) = pairs.experts.shape, neurons.w_up.shape
    of_pair = d if settings.form == "gathered" else 1
    most = max(8, _BLOCK_NUMBERS // (computed_pairs(settings.form, num_experts, slots) * of_pair))
    if is_symbolic_dim(num_tokens) or num_tokens <= most:
        return step(sums, pairs, *others)
    count = -(-num_tokens // most)
    size = -(-num_tokens // count)

    def cut(array, fill=0):
        padding = ((0, count * size - num_tokens), (0, 0))
        return jnp.pad(array, padding, constant_values=fill).reshape(count, size, -1)

    blocks = Pairs(cut(pairs.x), cut(pairs.weights), cut(pairs.experts, num_experts)), *map(cut, others)
    sums, results = lax.scan(lambda sums, block: step(sums, *block), sums, blocks)
    return sums, jax.tree.map(lambda a: a.reshape(count * size, -1)[:num_tokens], results)


def _product(lhs: Array, rhs: Array, lhs_axis: int, rhs_axis: int) -> Array:
    axes = (((lhs_axis,), (rhs_axis,)), ((), ()))
    return lax.dot_general(lhs, rhs, axes, preferred_element_type=accumulator_dtype(lhs.dtype))


# Dense


def _dense_output(settings: Settings, pairs: Pairs, neurons: Neurons):
    gate, _ = _dense_gate(pairs, neurons)
    hidden = gate * settings.activation(_product(pairs.x, neurons.w_up, 1, 1))
    return _product(hidden.astype(pairs.x.dtype), neurons.w_down, 1, 0).astype(pairs.x.dtype)


def _dense_gradients(settings: Settings, pairs: Pairs, neurons: Neurons, dy, sums: Neurons):
    dtype = pairs.x.dtype
    gate, place = _dense_gate(pairs, neurons)
    activated, activation_vjp = jax.vjp(settings.activation, _product(pairs.x, neurons.w_up, 1, 1))
    d_hidden = _product(dy, neurons.w_down, 1, 1)
    d_weights = (d_hidden * activated).reshape(-1).at[place].get(mode="fill", fill_value=0)
    d_up = activation_vjp(gate * d_hidden)[0].astype(dtype)
    hidden = (gate * activated).astype(dtype)
    sums = Neurons(sums.w_up + _product(d_up, pairs.x, 0, 0), sums.w_down + _product(hidden, dy, 0, 0))
    return _product(d_up, neurons.w_up, 1, 0).astype(dtype), d_weights, sums


def _dense_gate(pairs: Pairs, neurons: Neurons) -> tuple[Float[Array, "T E"], Int[Array, "T K"]]:
    """The weight of every expert for every token, and where each pair's is in it, counted through."""
    (num_tokens, _), num_experts = pairs.experts.shape, neurons.w_up.shape[0]
    place = jnp.arange(num_tokens, dtype=jnp.int32)[:, None] * num_experts + pairs.experts
    place = jnp.where(pairs.experts < num_experts, place, num_tokens * num_experts)
    wide = pairs.weights.astype(accumulator_dtype(pairs.x.dtype))
    return place_values(wide, place, num_tokens * num_experts).reshape(num_tokens, num_experts), place


# Grouped


class _Grid(NamedTuple):
    """Rows of the grid as experts of many neurons.

    Attributes:
      groups: a row of the kernels for each token and row of the grid in which it has an expert.
      gate: `(R, side)`, the weight of each neuron of a row, 0 for those that the token has not.
      place: `(T, K)`, where a pair's weight is in it, counted through.
      ups: `(side, d, side)`.
      downs: `(side, side, d)`.
    """

    groups: Dispatch
    gate: Float[Array, "R side"]
    place: Int[Array, "T K"]
    ups: Float[Array, "side d side"]
    downs: Float[Array, "side side d"]


def _grid(kernels: Kernels, pairs: Pairs, neurons: Neurons) -> _Grid:
    (_, slots), (num_experts, d) = pairs.experts.shape, neurons.w_up.shape
    side = side_of(num_experts)
    row, column = pairs.experts // side, pairs.experts % side
    if slots <= side:  # the first pair of a row has its slot, and those after it have none
        slot = jnp.argmax(row[:, :, None] == row[:, None], axis=2).astype(jnp.int32)
        rows = jnp.where(slot == jnp.arange(slots, dtype=jnp.int32), row, side)
    else:  # every row of the grid has a slot
        slot, each = jnp.minimum(row, side - 1), jnp.arange(side, dtype=jnp.int32)
        rows = jnp.where((row[:, :, None] == each).any(1), each, side)
    groups = group_by_expert(kernels, rows, side)
    numbers = groups.num_rows * side
    place = jnp.take_along_axis(groups.token_index_map, slot, axis=1) * side + column
    place = jnp.where(pairs.experts < num_experts, place, numbers)
    gate = place_values(pairs.weights.astype(pairs.x.dtype), place, numbers).reshape(-1, side)
    ups, downs = (array.reshape(side, side, d) for array in neurons)
    return _Grid(groups, gate, place, ups.swapaxes(1, 2), downs)


def _grouped_output(settings: Settings, pairs: Pairs, neurons: Neurons):
    kernels = settings.kernels
    grid = _grid(kernels, pairs, neurons)
    hidden = Gated(settings.activation)(*(a.astype(accumulator_dtype(a.dtype)) for a in _gated(kernels, pairs, grid)))
    down = partial(kernels.down_projection, hidden.astype(pairs.x.dtype), grid.downs, None, grid.groups)
    return _sums_of_rows(kernels, down, pairs, grid)


def _grouped_gradients(settings: Settings, pairs: Pairs, neurons: Neurons, dy, sums: Neurons):
    kernels = settings.kernels
    grid = _grid(kernels, pairs, neurons)
    groups = grid.groups
    ones = jnp.ones(groups.token_index_map.shape, jnp.float32)
    row_weights = place_values(ones, groups.token_index_map, groups.num_rows)
    gated = Gated(settings.activation)
    (d_up, d_gate), hidden, _ = kernels.down_backward(
        dy, grid.downs, None, _gated(kernels, pairs, grid), row_weights, groups, activation=gated
    )
    d_weights = d_gate.reshape(-1).at[grid.place].get(mode="fill", fill_value=0)
    wide = sums.w_up.dtype
    (d_ups,), _ = kernels.up_weight_gradients(pairs.x, (d_up,), groups, dtypes=(wide,), bias_dtypes=())
    d_downs, _ = kernels.down_weight_gradients(hidden, dy, row_weights, groups, dtype=wide, bias_dtype=None)
    shape = sums.w_up.shape
    sums = Neurons(sums.w_up + d_ups.swapaxes(1, 2).reshape(shape), sums.w_down + d_downs.reshape(shape))
    dx = _sums_of_rows(kernels, partial(kernels.up_backward, (d_up,), (grid.ups,), groups), pairs, grid)
    return dx, d_weights, sums


def _gated(kernels: Kernels, pairs: Pairs, grid: _Grid) -> tuple[Array, Array]:
    """`x · u` of every neuron of every row, and its gate."""
    _, up = kernels.up_projection(
        pairs.x, (grid.ups,), (), grid.groups, activation=_unchanged, keep_pre_activations=False
    )
    return up, grid.gate


def _unchanged(pre_activation):
    return pre_activation


def _sums_of_rows(kernels: Kernels, rows: Callable, pairs: Pairs, grid: _Grid) -> Float[Array, "T d"]:
    """The sums of each token's `rows(first_column, num_columns)`, a block of columns at a time."""
    (side, _, d), dtype, index = grid.downs.shape, pairs.x.dtype, grid.groups.token_index_map
    block = block_width(d, kernels.column_block(grid.groups.num_rows, d, side, side, dtype))
    return combine_columns(kernels, rows, block, index, None, empty((index.shape[0], d), dtype, grid.groups))


# Gathered


def _gathered_output(settings: Settings, pairs: Pairs, neurons: Neurons):
    hidden = pairs.weights * settings.activation(_dots(pairs.x, neurons.w_up, pairs.experts))
    return _weighted_sums(settings.kernels, neurons.w_down, pairs, hidden)


def _gathered_gradients(settings: Settings, pairs: Pairs, neurons: Neurons, dy, sums: Neurons):
    activated, activation_vjp = jax.vjp(settings.activation, _dots(pairs.x, neurons.w_up, pairs.experts))
    d_hidden = _dots(dy, neurons.w_down, pairs.experts)
    d_up = activation_vjp(pairs.weights * d_hidden)[0]
    dx = _weighted_sums(settings.kernels, neurons.w_up, pairs, d_up)
    factors = d_up, pairs.weights * activated
    return dx, activated * d_hidden, Neurons(*_added_by_expert(sums, (pairs.x, dy), factors, pairs.experts))


def _dots(tokens: Float[Array, "T d"], rows: Float[Array, "E d"], experts: Int[Array, "T K"]) -> Float[Array, "T K"]:
    """The product of each token with the rows of its experts, 0 in an empty slot.

    Not a matrix product: so XLA multiplies the rows as it reads them, and writes none of them.
    """
    wide, known = accumulator_dtype(tokens.dtype), experts < rows.shape[0]
    gathered = rows.at[jnp.where(known, experts, 0)].get(mode="promise_in_bounds").astype(wide)
    return jnp.where(known, (gathered * tokens[:, None].astype(wide)).sum(-1), 0)


def _weighted_sums(kernels: Kernels, rows: Float[Array, "E d"], pairs: Pairs, factors) -> Float[Array, "T d"]:
    return kernels.combine(rows, pairs.experts, factors, None, 0)


def _added_by_expert(
    sums: Neurons, tokens: tuple[Array, Array], factors: tuple[Array, Array], experts: Int[Array, "T K"]
) -> list[Float[Array, "E d"]]:
    """Each of `sums`, `(E, d)`, with `Σ factor · token` over the pairs of each expert: the same bits in every run.

    A scatter would add in any order on a GPU. Here the pairs are sorted by expert. A product with zeros and factors
    sums those of an expert in a run of pairs; a second one sums what an expert has in several runs. Then no expert
    is written twice at a time.
    """
    num_experts, slots, number = sums.w_up.shape[0], experts.shape[1], experts.size
    runs = min(_RUNS, -(-number // _RUN))
    steps = -(-number // (runs * _RUN))
    padding = (0, steps * runs * _RUN - number)
    ids, order = lax.sort((experts.reshape(-1), lax.iota(jnp.int32, number)), num_keys=1)
    ids = jnp.pad(ids, padding, constant_values=num_experts).reshape(steps, runs, _RUN)
    order = jnp.pad(order, padding).reshape(steps, runs, _RUN)
    run, place = jnp.arange(runs, dtype=jnp.int32), jnp.arange(_RUN, dtype=jnp.int32)

    def step(sums, pairs):
        ids, order = pairs
        first = jnp.concatenate([jnp.zeros((runs, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
        segment = jnp.cumsum(first, axis=1, dtype=jnp.int32)  # of pairs of one expert, in each run
        member = segment[:, None] == place[:, None]
        target = jnp.where(member, ids[:, None], -1).max(2)
        # An expert's pairs may go on from run to run: all of them belong to the run in which they begin.
        goes_on = jnp.concatenate([jnp.zeros(1, bool), ids[1:, 0] == ids[:-1, -1]])
        last = segment[:, -1]
        begins = lax.cummax(jnp.where(goes_on & (last == 0), -1, run))
        goes_to = jnp.where(goes_on, jnp.roll(begins, 1), -1)
        target = target.at[:, 0].set(jnp.where(goes_on, -1, target[:, 0]))
        beyond = num_experts + run[:, None] * _RUN + place  # dropped, and each but once
        target = jnp.where((target < 0) | (target >= num_experts), beyond, target)

        def added(total, tokens, factors):
            rows = tokens.at[order // slots].get(mode="promise_in_bounds")
            factor = factors.reshape(-1).at[order].get(mode="promise_in_bounds").astype(rows.dtype)
            matrix = jnp.where(member, factor[:, None], 0)
            of_segment = lax.dot_general(matrix, rows, (((2,), (1,)), ((0,), (0,))), preferred_element_type=total.dtype)
            goes = (goes_to == run[:, None]).astype(total.dtype)
            rest = jnp.dot(goes, of_segment[:, 0], precision=lax.Precision.HIGHEST)
            of_segment += jnp.where(place[:, None] == last[:, None, None], rest[:, None], 0)
            return total.at[target].add(of_segment, mode="drop", unique_indices=True)

        return [added(*each) for each in zip(sums, tokens, factors, strict=True)], None

    return lax.scan(step, list(sums), (ids, order))[0]


_FORMS: dict[Form, tuple[Callable, Callable]] = {
    "dense": (_dense_output, _dense_gradients),
    "grouped": (_grouped_output, _grouped_gradients),
    "gathered": (_gathered_output, _gathered_gradients),
}
