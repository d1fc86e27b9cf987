"""Products of experts' rows with adapters of low rank, made of the kernels that every family has.

A projection's weight W has an adapter (A, B) of rank r, the sum of which is never made. With rows of the tokens x:

    Z = x · A      P = x · W + Z · B      H = act(P)      Z' = H · A_down      rows of y = H · W_down + Z' · B_down

and back, with g a row's routing weight and dy the gradient of the layer's output:

    V = dy · B_downᵀ    dH = g (dy · W_downᵀ + V · A_downᵀ)    dZ = dP · Bᵀ    rows of dx = dP · Wᵀ + dZ · Aᵀ
    dA = Σ xᵀ · dZ     dB = Σ Zᵀ · dP     dA_down = Σ (g H)ᵀ · V     dB_down = Σ (g Z')ᵀ · dy

Each of these is a product that the layer has, with r in the place of a width: of tokens found by index (Z, V), of rows
(Z', dZ, and all that is added to a product with W), and over rows (the last four). Z, Z', V and dZ have r columns, and
are computed again rather than kept. What is added to P, and to dH, exists as rows of width n, as P itself does; what is
added to rows of y and dx, a block of columns at a time, as they do. Nothing is as large as T·K·d.

With `precision="fp8"` products with W round to 8 bits, and those with A and B do not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from blaze_jax.plan import Parameters, Projection, weights_and_biases
from pallas_kernels.contract import Dispatch, accumulator_dtype
from pallas_kernels.family import Kernels


def has_adapters(projections: Sequence[Projection]) -> bool:
    return any(projection.a is not None for projection in projections)


def up_projection(
    kernels: Kernels,
    x: Float[Array, "T d"],
    ups: Sequence[Projection],
    groups: Dispatch,
    *,
    activation: Callable[..., Array],
    keep_pre_activations: bool,
    in_turn: Callable[..., Sequence[Projection]] | None = None,
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"]]:
    """What the kernel of that name returns, of weights with adapters, whose part is added to P once that is rounded.

    `in_turn(projections, dtype, *before)` gives compressed weights as numbers, one projection's after the other's.
    """
    if in_turn is None:
        weights, biases = weights_and_biases(ups)
        pre_activations: Any = kernels.up_projection(x, weights, biases, groups, activation=_first)[0]
    else:
        pre_activations = []
        for up in ups:
            of_one = weights_and_biases(in_turn([up], x.dtype, x, pre_activations))
            options: dict[str, Any] = {"activation": _first, "keep_pre_activations": False}
            pre_activations.append(kernels.up_projection(x, *of_one, groups, **options)[1])
    width, added = ups[0].weight.shape[2], []
    for pre_activation, z, up in zip(pre_activations, reduced(kernels, x, ups, groups), ups, strict=True):
        rows = None if up.b is None else kernels.down_projection(z, up.b, None, groups, 0, width)
        added.append(pre_activation if rows is None else pre_activation + rows)
    wide = accumulator_dtype(x.dtype)
    hidden = activation(*(p.astype(wide) for p in added)).astype(x.dtype)
    return tuple(added) if keep_pre_activations else (), hidden


def reduced(kernels: Kernels, x: Float[Array, "T d"], ups: Sequence[Projection], groups: Dispatch) -> list[Any]:
    """`Z = x · A` of every row, for each projection; None for one without an adapter."""
    own = tuple(up.a for up in ups if up.a is not None)
    if not own:
        return [None] * len(ups)
    options: dict[str, Any] = {"activation": _first, "keep_pre_activations": len(own) > 1}
    found, hidden = kernels.unrounded.up_projection(x, own, (), groups, **options)
    rows = iter(found or (hidden,))
    return [None if up.a is None else next(rows) for up in ups]


def reduced_hidden(kernels: Kernels, hidden: Float[Array, "R n"], down: Projection, groups: Dispatch) -> Any:
    """`Z' = H · A_down` of every row; None without an adapter."""
    return None if down.a is None else kernels.down_projection(hidden, down.a, None, groups, 0, down.a.shape[2])


def reduced_gradient(kernels: Kernels, dy: Float[Array, "T d"], down: Projection, groups: Dispatch) -> Any:
    """`V = dy · B_downᵀ` of every row; None without an adapter."""
    if down.b is None:
        return None
    options: dict[str, Any] = {"activation": _first, "keep_pre_activations": False}
    return kernels.unrounded.up_projection(dy, (down.b.mT,), (), groups, **options)[1]


def reduced_gradients(
    kernels: Kernels, d_pre_activations: tuple[Float[Array, "R n"], ...], ups: Sequence[Projection], groups: Dispatch
) -> list[Any]:
    """`dZ = dP · Bᵀ` of every row, for each projection; None for one without an adapter."""
    return [
        None if up.b is None else kernels.up_backward((d_pre,), (up.b,), groups, 0, up.b.shape[1])
        for d_pre, up in zip(d_pre_activations, ups, strict=True)
    ]


def down_backward(
    kernels: Kernels,
    v: Float[Array, "R r"],
    down: Projection,
    pre_activations: tuple[Float[Array, "R n"], ...],
    row_weights: Float[Array, " R"],
    groups: Dispatch,
    *,
    activation: Callable[..., Array],
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, " R"]]:
    """What `V · A_downᵀ` adds to the gradients of P, and to those of the routing weights."""
    assert down.a is not None
    d_hidden = kernels.up_backward((v,), (down.a,), groups, 0, down.a.shape[1])
    wide = accumulator_dtype(d_hidden.dtype)
    d_hidden = d_hidden.astype(wide)
    hidden, activation_vjp = jax.vjp(activation, *(p.astype(wide) for p in pre_activations))
    d_pre = activation_vjp(row_weights.astype(wide)[:, None] * d_hidden)
    return tuple(d.astype(v.dtype) for d in d_pre), (d_hidden * hidden).sum(-1)


def plus(rows: Callable, others: Callable | None) -> Callable:
    """`rows(first_column, num_columns)` of two kernels, added up."""
    return rows if others is None else lambda first, number: rows(first, number) + others(first, number)


def gradients(
    kernels: Kernels,
    params: Parameters,
    dtypes: Parameters,
    groups: Dispatch,
    of_ups: tuple[Float[Array, "T d"], tuple[Float[Array, "R n"], ...], Sequence[Any]],
    of_down: tuple[Float[Array, "R n"], Float[Array, "T d"], Float[Array, " R"], Float[Array, "R r"] | None],
) -> Parameters:
    """Gradients of the adapters, of these dtypes.

    Args:
      kernels: the family that computes.
      params: the projections.
      dtypes: in the places of their gradients, None in those of frozen parameters.
      groups: the rows by expert.
      of_ups: `(x, dP, dZ)`.
      of_down: `(g · H, dy, g, V)`.
    """
    x, d_pre_activations, dzs = of_ups
    weighted_hidden, dy, row_weights, v = of_down
    num_rows = groups.num_rows
    own_row = jnp.where(groups.expert_token_indices < x.shape[0], jnp.arange(num_rows, dtype=jnp.int32), num_rows)
    by_row = groups._replace(expert_token_indices=own_row)  # products over rows gather the rows themselves

    ups, down = list(dtypes.ups), dtypes.down
    if adapted := [i for i, up in enumerate(params.ups) if up.a is not None]:
        types: tuple = tuple(ups[i].a for i in adapted)
        of_rows = tuple(dzs[i] for i in adapted)
        das, _ = kernels.up_weight_gradients(x, of_rows, groups, dtypes=types, bias_dtypes=())
        zs = reduced(kernels, x, params.ups, groups)
        for i, da in zip(adapted, das, strict=True):
            one = {"dtypes": (ups[i].b,), "bias_dtypes": ()}
            (db,), _ = kernels.up_weight_gradients(zs[i], (d_pre_activations[i],), by_row, **one)
            ups[i] = ups[i]._replace(a=da, b=db)
    if v is not None:
        z = reduced_hidden(kernels, weighted_hidden, params.down, groups)
        operands = (weighted_hidden, v, by_row, down.a), (z, dy, groups, down.b)
        da, db = (
            kernels.down_weight_gradients(rows, tokens, row_weights, of, dtype=dtype, bias_dtype=None)[0]
            for rows, tokens, of, dtype in operands
        )
        down = down._replace(a=da, b=db)
    return Parameters(tuple(ups), down)


def _first(*pre_activations: Array) -> Array:
    """No activation: for products that are wanted as they are."""
    return pre_activations[0]
