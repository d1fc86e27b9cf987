"""Up projection: gathered token rows through the gate and up weights of their expert, then the activation."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.contract import Dispatch
from pallas_kernels.hopper.elementwise import value
from pallas_kernels.hopper.inline import K_STEP, PANEL
from pallas_kernels.hopper.ring import PANELS
from pallas_kernels.hopper.row_matmul import HeldEnd, RowMatmul, store_rows, tile_panel
from pallas_kernels.mosaic.row_groups import TILE_COLUMNS, TileSchedule
from pallas_kernels.traced_once import traced_once
from pallas_kernels.tuning.parameters import TileTuning, find_tuning, shape_key


@traced_once("activation", "keep_pre_activations", "tuning")
def up_projection(
    x: Float[Array, "T d"],
    weights: tuple[Float[Array, "E d n"], ...],
    biases: tuple[Float[Array, "E n"], ...],
    groups: Dispatch[TileSchedule],
    *,
    activation: Callable[..., Array],
    keep_pre_activations: bool = True,
    into: tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"]] | None = None,
    tuning: TileTuning | None = None,
) -> tuple[tuple[Float[Array, "R n"], ...], Float[Array, "R n"]]:
    """Pre-activations (gate and up, or up alone) and activation of every row; see the portable twin.

    A tile holds `256 / len(weights)` columns of each projection side by side, so one wgmma multiplies a gathered tile
    with both. The activation is computed from the float32 accumulators and stored at the end of its tile; the packed
    pre-activations follow under the next tile. Where they are not kept, the activation does.

    `into` holds results of the same call for other groups, whose rows are kept.
    """
    weights = tuple(w.astype(x.dtype) for w in weights)
    num_experts, d, n = weights[0].shape
    shape = shape_key(groups.num_rows, x.dtype, d=d, n=n, E=num_experts)
    width = TILE_COLUMNS // len(weights)  # of a projection's part of a tile
    panels = width // PANEL
    column_tiles = -(-n // width)

    def place(panel, column_tile):
        """The projection that a panel of a tile belongs to, and its first column there."""
        return panel // panels, column_tile * width + panel % panels * PANEL

    def load(refs, tile, k, slot):
        for panel in range(PANELS):
            projection, column = place(panel, tile.column_tile)
            block = refs.weights[projection].at[tile.expert, pl.ds(k * K_STEP, K_STEP), pl.ds(column, PANEL)]
            slot.fetch(block, slot.rhs_panel(panel))

    def finish(refs, part, accumulator):
        packed, activated = {}, []
        for panel in range(panels):
            own = range(panel, PANELS, panels)  # of each projection
            pre = [tile_panel(refs, part, accumulator, p) for p in own]
            for p, values in zip(own, pre, strict=True):
                packed[p] = values.astype(x.dtype)
            activated.append(value(activation, pre).astype(x.dtype))
            if keep_pre_activations:
                column = place(panel, part.column_tile)[1]
                store_rows(refs, part, panel, activated[-1], refs.written[1], column)
        return lax.concatenate([packed[p] for p in range(PANELS)] if keep_pre_activations else activated, 1)

    def store(refs, part, panel, values):
        projection, column = place(panel, part.column_tile)  # the activation's panels are those of the first
        pre_activations, hidden = refs.written
        output = pre_activations[projection] if keep_pre_activations else hidden
        store_rows(refs, part, panel, values, output, column)

    bias = None
    if biases:  # in the order of a tile's columns
        padded = [jnp.pad(b.astype(jnp.float32), ((0, 0), (0, column_tiles * width - n))) for b in biases]
        bias = jnp.concatenate([b.reshape(-1, column_tiles, width) for b in padded], axis=2)

    rows = jax.ShapeDtypeStruct((groups.num_rows, n), x.dtype)
    kernel = RowMatmul(
        groups.tiles,
        {"tokens": x, "token_indices": groups.expert_token_indices, "weights": weights, "bias": bias, "into": into},
        column_tiles=column_tiles,
        k_steps=-(-d // K_STEP),
        load=load,
        end=HeldEnd(finish, store, columns=TILE_COLUMNS if keep_pre_activations else width),
        tuning=find_tuning(TileTuning, "up_projection", tuning, shape),
    )
    return kernel.run(
        "moe_up_projection",
        results={"written": ((rows,) * len(weights) if keep_pre_activations else (), rows)},
        aliases=[("into", "written")] if into else (),
        copies=PANELS,
        registers=(88, 208),
    ).written
