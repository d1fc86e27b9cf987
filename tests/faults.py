"""Whether the tests notice faults: `python -m tests.faults [--all] [--named] [WORD ...]` makes them, one at a time, in a copy.

Each fault changes one expression. The tests that should notice it run first, a process for each core, and only if they
pass, the whole suite; what no test notices is reported, and more than a few of those is an error. With words, only faults
whose place or text has one of them.
"""

# ruff: noqa: E501  (a fault is a line)

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MAY_SURVIVE = 0.1  # of the faults, the default suite; --all must notice every one
SECONDS = 1800  # of a run of the tests at most


class Fault(NamedTuple):
    """`old`, which stands once in the file, becomes `new`; `tests` are where it should be noticed."""

    file: str
    old: str
    new: str
    tests: str


XLA, HOPPER, SIMT, LAYER = "pallas_kernels/xla", "pallas_kernels/hopper", "pallas_kernels/simt", "blaze_jax"
AMPERE, ROUTING_KERNELS = "pallas_kernels/ampere", "pallas_kernels/routing"
FILES = "blaze_jax/checkpoints"
KERNELS, MODULES = "tests/pallas_kernels", "tests/blaze_jax"
ROUTER = f"{MODULES}/test_routing_losses.py {MODULES}/test_routing.py {KERNELS}/routing/test_router.py"
ROUTING = f"{MODULES}/test_routing_capacity.py {MODULES}/test_token_rounding.py {MODULES}/test_routing.py"
EXPERTS = f"{MODULES}/test_experts.py {MODULES}/test_experts_batched.py"
QUEUE = f"{KERNELS}/hopper/test_tile_queue.py"
LOOPS = f"{KERNELS}/xla/test_row_groups.py {MODULES}/test_experts_batched.py {KERNELS}/test_weight_gradients.py"

ON_AMPERE = f"{KERNELS}/ampere/test_as_every_family.py"
TILES, EDGES, FLOAT32 = (f"{KERNELS}/ampere/test_{name}.py" for name in ("tiles", "edges", "float32"))

PARALLEL = f"{MODULES}/test_parallelism.py"
AUTOMATIC = f"{MODULES}/test_automatic_mesh.py"
PIECES, EXCHANGE, RANGES = (f"{MODULES}/test_{name}.py" for name in ("pieces", "exchange", "token_ranges"))

# fmt: off
FAULTS = [
    # the router and its losses
    Fault(f"{XLA}/router.py", "ranking = jnp.where(ranking == 0, 0, ranking)", "ranking = ranking", ROUTER),
    Fault(f"{XLA}/router.py", "jnp.where(best == -jnp.inf, EMPTY_SLOT,", "jnp.where(best == jnp.inf, EMPTY_SLOT,", ROUTER),
    Fault(f"{XLA}/router.py", "ranking = jnp.where(logits == -jnp.inf, -jnp.inf, ranking)", "ranking = ranking", ROUTER),
    Fault(f"{XLA}/router.py", "top_k(grouped, min(2, grouped.shape[-1]))", "top_k(grouped, 1)", ROUTER),
    Fault(f"{XLA}/router.py", "return rule.scale * jnp.where(values", "return jnp.where(values", ROUTER),
    Fault(f"{XLA}/router.py", "return demand.shape[0] * jnp.vdot(share", "return jnp.vdot(share", ROUTER),
    Fault(f"{XLA}/router.py", "jnp.square(jax.nn.logsumexp(logits, axis=-1))", "jax.nn.logsumexp(logits, axis=-1)", ROUTER),
    Fault(f"{XLA}/router.py", "entropy=-jnp.sum(", "entropy=jnp.sum(", ROUTER),
    Fault(f"{XLA}/router.py", "losses_vjp((d_losses, d_probability))[0] + common_vjp(d_common)[0]", "losses_vjp((d_losses, d_probability))[0]", ROUTER),
    Fault(f"{XLA}/router.py", "return jnp.where(experts == EMPTY_SLOT, num_experts, experts)", "return experts", ROUTER),
    Fault(f"{ROUTING_KERNELS}/router.py", "MAX_EXPERTS = 1024", "MAX_EXPERTS = 512", f"{KERNELS}/routing/test_router.py {MODULES}/test_routing_hopper.py"),
    # what comes after the choice
    Fault(f"{LAYER}/capacity.py", "rank < capacity", "rank <= capacity", ROUTING),
    Fault(f"{LAYER}/routing.py", "tokens_per_expert = jnp.minimum(demand, capacity)", "tokens_per_expert = demand", ROUTING),
    Fault(f"{LAYER}/routing.py", "weights = jnp.where(experts == EMPTY_SLOT, 0, weights)", "weights = weights", ROUTING),
    Fault(f"{LAYER}/routing.py", "return selection_bias + rate * jnp.sign(demand.mean() - demand)", "return selection_bias - rate * jnp.sign(demand.mean() - demand)", f"{ROUTING} {MODULES}/test_linen.py"),
    Fault(f"{LAYER}/router.py", "experts_per_token > 1 if self.normalize_weights is None", "True if self.normalize_weights is None", ROUTING),
    Fault(f"{LAYER}/routing.py", "num_tokens *= devices", "devices = devices", f"{MODULES}/test_axis_name.py"),
    Fault(f"{LAYER}/routing.py", "losses.balance * share * share", "losses.balance * share", ROUTER),
    Fault(f"{LAYER}/router.py", "return self if train else replace(self, token_rounding=None)", "return self", f"{MODULES}/test_layer.py"),
    Fault(f"{LAYER}/routing.py", "        grouped = None\n", "", f"{MODULES}/test_grouped_once.py {MODULES}/test_routing_hopper.py"),
    Fault(f"{LAYER}/experts.py", "if grouped and grouped.kernels.dispatch is kernels.dispatch:", "if grouped:", f"{MODULES}/test_grouped_once.py"),
    Fault(f"{LAYER}/layer_program.py", "partial(compute_experts, grouped)", "partial(compute_experts, None)", f"{MODULES}/test_grouped_once.py"),
    Fault(f"{LAYER}/token_rounding.py", "wanted = -(-demand // tile) * tile if mode", "wanted = demand // tile * tile if mode", ROUTING),
    Fault(f"{LAYER}/token_rounding.py", "(demand + tile // 2) // tile * tile", "(demand + tile // 2 - 1) // tile * tile", ROUTING),
    Fault(f"{LAYER}/token_rounding.py", 'last_resort = demand if mode == "up" else down', "last_resort = down", ROUTING),
    Fault(f"{LAYER}/token_rounding.py", "scores = jnp.where(jnp.isnan(scores), 0, scores)", "scores = scores", ROUTING),
    Fault(f"{XLA}/token_selection.py", "jnp.argmax(equal_so_far >= (wanted - larger)", "jnp.argmax(equal_so_far > (wanted - larger)", f"{KERNELS}/test_token_selection.py {MODULES}/test_token_rounding.py"),
    Fault("pallas_kernels/contract.py", "(token <= self.tokens[expert])", "(token < self.tokens[expert])", f"{KERNELS}/test_token_selection.py {MODULES}/test_token_rounding.py"),
    # the dispatch
    Fault(f"{XLA}/dispatch.py", "earlier = (place[None] < place[:, None])[None]", "earlier = (place[None] <= place[:, None])[None]", f"{KERNELS}/test_dispatch.py"),
    Fault(f"{XLA}/dispatch.py", "aligned_sizes = -(-group_sizes // row_alignment) * row_alignment", "aligned_sizes = group_sizes", f"{KERNELS}/test_dispatch.py"),
    Fault(f"{XLA}/dispatch.py", "pairs_before_tile = jnp.cumsum(counts, axis=0) - counts", "pairs_before_tile = jnp.cumsum(counts, axis=0)", f"{KERNELS}/test_dispatch.py {MODULES}/test_dispatch.py"),
    Fault(f"{XLA}/dispatch.py", "jnp.where(tiles < num_experts, rows, num_rows)", "rows", f"{KERNELS}/test_dispatch.py {MODULES}/test_dispatch.py"),
    Fault(f"{ROUTING_KERNELS}/dispatch_place.py", "lower_lanes = (simt.Int(1) << self.lane) - 1", "lower_lanes = simt.Int(1) << self.lane", f"{KERNELS}/routing/test_dispatch.py {KERNELS}/test_dispatch.py"),
    Fault(f"{ROUTING_KERNELS}/dispatch_place.py", "select((expert >= 0) & (expert < num_experts), expert, num_experts)", "select(expert < num_experts, expert, num_experts)", f"{KERNELS}/routing/test_dispatch.py {KERNELS}/test_dispatch.py"),
    Fault(f"{LAYER}/dispatch.py", "wrong = (values < EMPTY_SLOT) | (values >= num_experts)", "wrong = values >= num_experts", f"{MODULES}/test_dispatch.py {MODULES}/test_experts_errors.py"),
    # the loops over rows
    Fault("pallas_kernels/xla/loops.py", "mine = (row >= wanted[:, None]) & (row < end[:, None])", "mine = row < end[:, None]", LOOPS),
    Fault("pallas_kernels/xla/loops.py", "tiles = ((end - first).max() + turn.rows - 1) // turn.rows", "tiles = (end - first).max() // turn.rows", LOOPS),
    Fault("pallas_kernels/xla/loops.py", "tiles = ((end - first).max() +", "tiles = ((end - first).min() +", LOOPS),
    Fault("pallas_kernels/xla/loops.py", "busy = (load > 0).sum(dtype=jnp.int32)", "busy = (load > 1).sum(dtype=jnp.int32)", LOOPS),
    Fault("pallas_kernels/xla/loops.py", "return jnp.where(tile.mine, read_rows(array, tile), 0)", "return read_rows(array, tile)", LOOPS),
    Fault("pallas_kernels/xla/loops.py", "preferred_element_type=accumulator_dtype(lhs.dtype)", "preferred_element_type=lhs.dtype", f"{KERNELS}/test_up_projection_and_backward.py {KERNELS}/test_weight_gradients.py"),
    Fault("pallas_kernels/xla/loops.py", "accumulator_dtype(o.dtype, *read), groups, like)", "o.dtype, groups, like)", f"{KERNELS}/test_weight_gradients.py {EXPERTS}"),
    # each term of the VJP, portable
    Fault("pallas_kernels/xla/experts.py", "d_weight = (d_hidden * hidden).sum(-1, keepdims=True)", "d_weight = d_hidden.sum(-1, keepdims=True)", f"{KERNELS}/test_down_projection_and_backward.py {EXPERTS}"),
    Fault("pallas_kernels/xla/experts.py", "d_weight += product(dy_rows, own[1][:, None], 2, 2)", "d_weight += 0", f"{KERNELS}/test_down_projection_and_backward.py {EXPERTS}"),
    Fault("pallas_kernels/xla/experts.py", "activation_vjp(weight * d_hidden), weight * hidden", "activation_vjp(d_hidden), weight * hidden", f"{KERNELS}/test_down_projection_and_backward.py {EXPERTS}"),
    Fault("pallas_kernels/xla/experts.py", "activation_vjp(weight * d_hidden), weight * hidden", "activation_vjp(weight * d_hidden), hidden", f"{KERNELS}/test_down_projection_and_backward.py {EXPERTS}"),
    Fault("pallas_kernels/xla/experts.py", "_column_sums(weight * dy_rows", "_column_sums(dy_rows", f"{KERNELS}/test_weight_gradients.py {EXPERTS}"),
    Fault("pallas_kernels/xla/experts.py", "pre = [p + b for p, b in zip(pre, own_biases, strict=True)] if own_biases else pre", "pre = pre", f"{KERNELS}/test_up_projection_and_backward.py {EXPERTS}"),
    Fault("pallas_kernels/xla/dispatch.py", "weights[:, slot, None].astype(wide) * row", "row", f"{KERNELS}/test_combine.py {EXPERTS}"),
    Fault(f"{LAYER}/token_sums.py", "carry[0] < width, turn,", "carry[0] <= width - block, turn,", EXPERTS),
    Fault(f"{LAYER}/experts_vjp.py", "jnp.where(tokens.experts < num_experts, tokens.weights, jnp.nan)", "tokens.weights", f"{MODULES}/test_experts_errors.py {MODULES}/test_experts_poison.py"),
    Fault(f"{LAYER}/experts_vjp.py", 'if plan.save == "pre_activations":', "if True:", f"{MODULES}/test_experts_memory.py"),
    Fault(f"{LAYER}/experts_vjp.py", "partial(_up_projection, True), partial(_up_projection, False))", "partial(_up_projection, True))", f"{MODULES}/test_experts_memory.py"),
    Fault(f"{LAYER}/experts_vjp.py", "tuple(tuple(map(checkpoint_name, p, names)) for p in pre_activations)", "tuple(pre_activations)", f"{MODULES}/test_experts_memory.py"),
    Fault(f"{LAYER}/experts.py", "checkpoint_name((dispatch, most_pairs), INDEX_NAME)", "(dispatch, most_pairs)", f"{MODULES}/test_experts_memory.py"),
    # the Hopper kernels, interpreted
    Fault(f"{HOPPER}/ring.py", "gather.wait_landed(self.landed, slot.number, lax.rem(step // self.stages, 2))", "pass", f"{KERNELS}/test_up_projection_and_backward.py {KERNELS}/mosaic/test_interpreter.py"),
    Fault(f"{HOPPER}/row_matmul.py", "rows = jnp.clip(self.rows - first, 0, GROUP_ROWS)", "rows = jnp.clip(self.rows, 0, GROUP_ROWS)", f"{KERNELS}/hopper/test_tile_order.py"),
    Fault(f"{HOPPER}/ring.py", "self.release(step + self.stages - 1)\n            return step + 1", "self.release(step)\n            return step + 1", f"{KERNELS}/test_up_projection_and_backward.py {KERNELS}/test_down_projection_and_backward.py"),
    Fault("pallas_kernels/hopper/panels.py", "plgpu.wait_smem_to_gmem(1, wait_read_only=True)", "plgpu.wait_smem_to_gmem(2, wait_read_only=True)", f"{KERNELS}/test_up_projection_and_backward.py {KERNELS}/mosaic/test_interpreter.py"),
    Fault(f"{HOPPER}/down_backward.py", "d_weight += (d_hidden * hidden).sum(axis=1)", "d_weight = (d_hidden * hidden).sum(axis=1)", f"{KERNELS}/test_down_projection_and_backward.py"),
    Fault(f"{HOPPER}/down_backward.py", "value_and_gradients(activation, pre, weight * d_hidden)", "value_and_gradients(activation, pre, d_hidden)", f"{KERNELS}/test_down_projection_and_backward.py"),
    Fault(f"{HOPPER}/weight_gradients.py", "@pl.when(tile.end - row < K_STEP)", "@pl.when(tile.end - row < 0)", f"{KERNELS}/test_weight_gradients.py"),
    Fault(f"{HOPPER}/weight_gradients.py", "row = jnp.where(k + 1 < steps, row, start_of(following))", "row = row", f"{KERNELS}/test_weight_gradients.py {QUEUE}"),
    Fault(f"{HOPPER}/tile_queue.py", "        plgpu.barrier_wait(self.refs.handed.at[place])\n", "", f"{QUEUE} {KERNELS}/test_weight_gradients.py"),
    Fault(f"{HOPPER}/tile_queue.py", "        pl.when(turn >= PLACES)(lambda: plgpu.barrier_wait(self.refs.taken.at[place]))\n", "", f"{QUEUE} {KERNELS}/test_weight_gradients.py"),
    Fault(f"{HOPPER}/row_matmul.py", "is_one, number = number < tiles,", "is_one, number = number <= tiles,", QUEUE),
    Fault(f"{ROUTING_KERNELS}/combine.py", "addend.load_vector(Long(token) * width + column, COLUMNS).wide()", "sums", f"{KERNELS}/test_combine.py"),
    Fault("pallas_kernels/xla/dispatch.py", "jnp.zeros(shape, wide) if addend is None else addend.astype(wide)", "jnp.zeros(shape, wide)", f"{KERNELS}/test_combine.py"),
    Fault(f"{ROUTING_KERNELS}/combine.py", "values = select(is_slot, values, Vector.zeros(rows.kind, COLUMNS))", "pass", f"{KERNELS}/routing/test_combine.py"),
    Fault(f"{ROUTING_KERNELS}/combine.py", "select(is_slot, shuffle(factor, slot), 0.0)", "shuffle(factor, slot)", f"{KERNELS}/routing/test_combine.py"),
    Fault(f"{ROUTING_KERNELS}/combine.py", "counts = counts | ~factor.equals(factor)", "pass", f"{KERNELS}/routing/test_combine.py"),
    Fault(f"{ROUTING_KERNELS}/combine.py", "lanes_where(counts & (lane < size))", "lanes_where(counts)", f"{KERNELS}/test_combine.py {KERNELS}/routing/test_combine.py"),
    Fault(f"{HOPPER}/row_matmul.py", "if self.used is None else refs.used[0]\n", "if self.used is None else refs.used[0] - 1\n", QUEUE),
    # the kernels for Ampere, interpreted
    Fault(f"{AMPERE}/pipeline.py", "ahead = ring.tile.stages - 1", "ahead = ring.tile.stages", TILES),
    Fault(f"{AMPERE}/pipeline.py", "wait_for_copies(self.tile.stages - 2)", "wait_for_copies(self.tile.stages - 1)", TILES),
    Fault(f"{AMPERE}/pipeline.py", "        simt.block_barrier()\n", "", TILES),
    Fault(f"{AMPERE}/pipeline.py", "state = operands.state(following + 1)", "state = operands.state(following)", f"{KERNELS}/ampere/test_weight_gradients.py"),
    Fault("pallas_kernels/mosaic/jaxprs.py", "jax.sharding.use_abstract_mesh(_NO_MESH)", "jax.named_scope('')", f"{KERNELS}/simt/test_elementwise.py"),
    Fault("pallas_kernels/compat.py", "jax.tree.flatten(vary_over(arrays, varying_axes(arrays)))", "jax.tree.flatten(arrays)", f"{KERNELS}/mosaic/test_unchecked.py"),
    Fault(f"{AMPERE}/pipeline.py", "simt.block_barrier()  # all have left", "0  # all have left", TILES),
    Fault(f"{AMPERE}/pipeline.py", "if not ring_is_free or each == 1:", "if each == 1:", TILES),
    Fault(f"{AMPERE}/row_matmul.py", "start_piece(column_tile, step - steps)", "start_piece(columns.first, step - steps)", TILES),
    Fault(f"{AMPERE}/tile.py", "column_tile * width + later + self.panel * PANEL", "column_tile * width + self.panel * PANEL", ON_AMPERE),
    Fault(f"{AMPERE}/row_matmul.py", "                ring.wait()\n", "", ON_AMPERE),
    Fault(f"{AMPERE}/row_matmul.py", "[tensor_operand(load_matrices(rows, word + m * apart), kind) for", "[load_matrices(rows, word + m * apart) for", FLOAT32),
    Fault(f"{AMPERE}/operands.py", "return tensor_operand(load_matrices(columns, word + first * (self.tile.k_step // 2)), self.kind)", "return load_matrices(columns, word + first * (self.tile.k_step // 2))", FLOAT32),
    Fault(f"{AMPERE}/operands.py", "all_or_none(first + chunk_elements < k.depth, valid_rows - row) > i * apart", "valid_rows - row > i * apart", EDGES),
    Fault(f"{AMPERE}/operands.py", "all_or_none(step_row + row < k.depth, Int(end) - column) > later", "Int(end) - column > later", ON_AMPERE),
    Fault(f"{AMPERE}/operands.py", "select(second, step - self.of_pair, step) * self.each", "step * self.each", f"{MODULES}/test_experts_ampere.py"),
    Fault("pallas_kernels/ampere/operands.py", "return tensor_operand([registers[i] for i in ((0, 2, 1, 3) if left else range(4))], self.kind)", "return [registers[i] for i in ((0, 2, 1, 3) if left else range(4))]", FLOAT32),
    Fault("pallas_kernels/ampere/operands.py", "else row % 8\n", "else row % 4\n", TILES),
    Fault("pallas_kernels/ampere/operands.py", "(lane % 8 + lane // 16 * 8, lane // 8 % 2) if left", "(lane % 16, lane // 16) if left", ON_AMPERE),
    Fault("pallas_kernels/ampere/down_backward.py", "known = (of_warp < where.rows) & (column < self.columns)", "known = column < self.columns", EDGES),
    Fault(f"{AMPERE}/pieces.py", "else (row >> 1) % 4", "else row % 4", TILES),
    Fault(f"{AMPERE}/tile.py", "across = minimum(Int(row_tiles) - first, rows)", "across = Int(rows)", ON_AMPERE),
    Fault(f"{AMPERE}/weight_gradients.py", "known = (row < end) & (token >= 0)", "known = (row <= end) & (token >= 0)", ON_AMPERE),
    Fault(f"{AMPERE}/down_backward.py", "row_weights[2 * of_rows + i]", "row_weights[of_rows + i]", ON_AMPERE),
    Fault("pallas_kernels/ampere/projections.py", "[add_bias(values, own) for", "[add_bias(add_bias(values, own), own) for", TILES),
    Fault("pallas_kernels/ampere/row_matmul.py", "(row < where.rows) & (own < num_columns)", "(row <= where.rows) & (own < num_columns)", ON_AMPERE),
    Fault("pallas_kernels/tuning/parameters.py", "block_kib(capability) > 99", "block_kib(capability) >= 99", f"{KERNELS}/tuning/test_tuning.py"),
    Fault(f"{SIMT}/interpreter.py", "memories[after].accesses = memories[after - updated].accesses", "pass", f"{KERNELS}/simt/test_language.py"),
    # tokens in ranges
    Fault(f"{LAYER}/plan.py", "second = self.num_tokens - (self.count - 1) * self.size", "second = self.size", RANGES),
    Fault(f"{LAYER}/plan.py", "jnp.where(tokens < self.size, start + tokens, self.num_tokens)", "start + tokens", RANGES),
    Fault(f"{LAYER}/plan.py", "max(RANGE_BYTES // row_bytes, ROWS_PER_EXPERT", "min(RANGE_BYTES // row_bytes, ROWS_PER_EXPERT", RANGES),
    Fault(f"{LAYER}/experts_vjp.py", "lambda array: accumulator_dtype(array.dtype), params", "lambda array: array.dtype, params", RANGES),
    # over devices
    Fault(f"{LAYER}/token_sums.py", "there if addend is None else addend + there", "addend", PIECES),
    Fault(f"{LAYER}/token_sums.py", "arriving.append(reduce(jnp.add, departed)", "arriving.append(departed[0]", PIECES),
    Fault(f"{LAYER}/token_sums.py", "y = done = finished(y, operands, number - 1)", "y = done = finished(None, operands, number - 1)", PIECES),
    Fault(f"{LAYER}/experts_vjp.py", "else d_weights + of_slots", "else of_slots", PARALLEL),
    Fault(f"{LAYER}/exchange.py", "first = lax.axis_index(self.expert) * num_experts", "first = lax.axis_index(self.group) * num_experts", PARALLEL),
    Fault(f"{ROUTING_KERNELS}/dispatch.py", "jnp.moveaxis(rows.reshape(-1, parts), 1, 0)", "rows.reshape(parts, -1)", f"{KERNELS}/hopper/test_in_parts.py"),
    Fault(f"{ROUTING_KERNELS}/dispatch.py", "tokens = groups.expert_token_indices - p * of_part", "tokens = groups.expert_token_indices % of_part", f"{KERNELS}/hopper/test_in_parts.py"),
    Fault(f"{ROUTING_KERNELS}/dispatch.py", "first if counted_from is None else counted_from", "first", f"{KERNELS}/hopper/test_in_parts.py"),
    Fault(f"{ROUTING_KERNELS}/dispatch.py", "values.at[before + tile].get", "values.at[tile].get", f"{KERNELS}/hopper/test_in_parts.py"),
    Fault(f"{LAYER}/exchange.py", "group=self.fsdp, shift=-block", "group=self.fsdp, shift=block", PIECES),
    Fault(f"{LAYER}/exchange.py", "(experts - first) % num_experts", "experts", PIECES),
    Fault(f"{LAYER}/exchange.py", "group=self.fsdp, shift=block)", "group=self.fsdp, shift=-block)", PIECES),
    Fault(f"{LAYER}/exchange.py", "group=self.group, shift=-shift) for", "group=self.group, shift=shift) for", EXCHANGE),
    Fault(f"{LAYER}/exchange.py", "devices.transpose([ordered.index(axis) for axis in group])", "devices", EXCHANGE),
    Fault(f"{LAYER}/exchange.py", "return jnp.where(known, (experts", "return jnp.where(experts < num_experts, (experts", EXCHANGE),
    Fault(f"{LAYER}/exchange.py", "return all(_has(spec[0], self.fsdp) and", "return all(True or", EXCHANGE),
    Fault(f"{LAYER}/exchange.py", "most_pairs = jnp.max(", "most_pairs = jnp.min(", EXCHANGE),
    Fault(f"{LAYER}/plan.py", "rows, axes = tokens.most_pairs + groups * (ROW_MULTIPLE - 1),", "rows, axes = tokens.most_pairs,", EXCHANGE),
    Fault(f"{LAYER}/experts_vjp.py", "Journeys((*to_come(transport, [params.down]), *to_come(transport, params.ups)))", "Journeys((*to_come(transport, params.ups), *to_come(transport, [params.down])))", PIECES),
    Fault(f"{LAYER}/schedule.py", "partial(transport.block_arrives, pair, block)", "partial(transport.block_arrives, pair, 1)", PIECES),
    Fault(f"{LAYER}/experts_vjp.py", "own[i % len(own)] = _sum(own[i % len(own)], gradients)", "own[i % len(own)] = gradients", PIECES),
    Fault(f"{HOPPER}/up_projection.py", 'aliases=[("into", "written")] if into else ()', "aliases=()", f"{KERNELS}/hopper/test_in_parts.py"),
    Fault(f"{LAYER}/exchange.py", "return tuple(_rotated(tokens, self.group, shift) for shift in range(self.devices))", "return tuple(_rotated(tokens, self.group, shift) for shift in range(self.devices))[::-1]", PARALLEL),
    Fault(f"{LAYER}/exchange.py", "unknown = experts >= num_experts * self.expert_devices", "unknown = experts < 0", PARALLEL),
    Fault(f"{LAYER}/experts.py", "given[\"b_down\"] = jnp.where(lax.axis_index(tensor) == 0, given[\"b_down\"], 0)", "given[\"b_down\"] = given[\"b_down\"]", PARALLEL),
    Fault(f"{LAYER}/plan.py", "turns = lax.pmax(vary_over(turns, axes), tuple(sorted(axes)))", "turns = lax.pmin(vary_over(turns, axes), tuple(sorted(axes)))", PARALLEL),
    Fault(f"{LAYER}/experts_vjp.py", "rows, dys, down, gradients)", "rows, dys, down)", PARALLEL),
    Fault(f"{LAYER}/experts_vjp.py", "[before.down, *before.ups][len(own) :][: len(gradients)]", "[before.down, *before.ups][: len(gradients)]", PARALLEL),
    Fault(f"{LAYER}/routing.py", "jnp.sum(routed.experts[:, 0] != EMPTY_SLOT, dtype=jnp.int32)", "jnp.int32(num_tokens)", f"{ROUTING} {PARALLEL}"),
    Fault(f"{LAYER}/compiled_once.py", "(family_in_demand(), forced_turn())", "()", f"{MODULES}/test_eager.py"),
    Fault(f"{LAYER}/compiled_once.py", "None if are_observers() else ", "", f"{MODULES}/test_eager.py"),
    Fault("pallas_kernels/mosaic/traced_once.py", "jax.jit(run, static_argnames=settings, inline=INLINE_WHILE_TRACING if inline else False)", "run", f"{MODULES}/test_eager.py"),
    Fault(f"{LAYER}/layer_program.py", "lax.pmean if jnp.issubdtype", "lax.psum if jnp.issubdtype", PARALLEL),
    Fault(f"{XLA}/dispatch.py", "(place >= 0) & (place < offsets[-1])", "place >= 0", f"{KERNELS}/test_row_range.py"),
    # public checkpoints
    Fault(f"{FILES}/decode.py", "[blocks & 15, blocks >> 4]", "[blocks >> 4, blocks & 15]", f"{MODULES}/checkpoints/test_decode.py"),
    Fault(f"{FILES}/decode.py", "jnp.where(scale == MXFP4_NAN", "jnp.where(scale == 256", f"{MODULES}/checkpoints/test_decode.py"),
    Fault(f"{FILES}/layouts.py", "step = len(self.parameters) if self.alternating else 1", "step = 1", f"{MODULES}/checkpoints/test_load.py"),
    Fault(f"{FILES}/layouts.py", 'Tensor("experts.gate_up_proj", ("w_gate", "w_up"), alt', 'Tensor("experts.gate_up_proj", ("w_up", "w_gate"), alt', f"{MODULES}/checkpoints/test_load.py"),
    Fault(f"{FILES}/layouts.py", '_by_expert("w1", "w3", "w2")', '_by_expert("w3", "w1", "w2")', f"{MODULES}/checkpoints/test_load.py"),
    Fault(f"{FILES}/matrices.py", "return slice(part.start // unit, -(-part.stop // unit))", "return slice(part.start // unit, part.stop // unit)", f"{MODULES}/checkpoints/test_load.py"),
    Fault(f"{FILES}/matrices.py", "(part.start - around.start, part.stop - around.start)", "(0, part.stop - part.start)", f"{MODULES}/checkpoints/test_load.py"),
    Fault(f"{FILES}/matrices.py", "at = [expert - start for start, _ in leading]", "at = [expert for _ in leading]", f"{MODULES}/checkpoints/test_load.py"),
    Fault(f"{FILES}/matrices.py", "start = -memory.ctypes.data % 64", "start = -memory.ctypes.data % 64 + 2", f"{MODULES}/checkpoints/test_load.py"),
    Fault(f"{FILES}/folder.py", "if self.shape != tuple(shape):", "if len(self.shape) != len(tuple(shape)):", f"{MODULES}/checkpoints/test_errors.py"),
    Fault(f"{FILES}/folder.py", 'or ".." in path.parts', "", f"{MODULES}/checkpoints/test_errors.py"),
    Fault(f"{FILES}/layouts.py", "if missing := sorted(names - present - optional):", "if missing := []:", f"{MODULES}/checkpoints/test_errors.py"),
    Fault(f"{FILES}/matrices.py", "~np.isfinite(scales)", "np.isposinf(scales)", f"{MODULES}/checkpoints/test_headers.py"),
    Fault(f"{FILES}/folder.py", "if body + start != at:", "if body + start < at:", f"{MODULES}/checkpoints/test_headers.py"),
    Fault("blaze_jax/huggingface.py", "if self._values.get(name) and not", "if name in self._values and not", f"{MODULES}/checkpoints/test_config.py"),
    Fault(f"{FILES}/layouts.py", "optional = set() if config.selection_bias else", "optional = set() if config.has_selection_bias else", f"{MODULES}/checkpoints/test_save.py"),
    Fault("blaze_jax/huggingface.py", "(layer + 1) % step", "layer % step", f"{MODULES}/checkpoints/test_config.py"),
    Fault(f"{FILES}/writing.py", "unfinished.replace(folder / INDEX)", 'unfinished.replace(folder / "index")', f"{MODULES}/checkpoints/test_save.py"),
    Fault(f"{FILES}/writing.py", "stack.enter_context(locked(folder))", "pass", f"{MODULES}/checkpoints/test_overwrite.py"),
    Fault(f"{FILES}/writing.py", "return TensorFile(path).tensors.keys() <= names", "return False", f"{MODULES}/checkpoints/test_overwrite.py"),
    Fault(f"{FILES}/writing.py", "elif len(kept) < len(file.tensors):", "elif False:", f"{MODULES}/checkpoints/test_overwrite.py"),
    # the layer and its modules
    Fault(f"{LAYER}/shared_experts.py", "names = (\"shared_w_gate\", \"shared_w_up\")", "names = (\"shared_w_up\", \"shared_w_gate\")", f"{MODULES}/test_layer.py"),
    Fault(f"{LAYER}/linen.py", "bool(train and self.config.bias_update_rate and", "bool(self.config.bias_update_rate and", f"{MODULES}/test_linen.py"),
    Fault(f"{LAYER}/shared_calls.py", "demand = self.demand + demand", "demand = demand", f"{MODULES}/test_shared_calls.py"),
    Fault(f"{LAYER}/layer.py", "accumulator_dtype(x.dtype), math.prod", "jnp.float32, math.prod", f"{MODULES}/test_shared_calls.py"),
    Fault(f"{LAYER}/placement.py", "lax.axis_index(axes) * size", "0 * lax.axis_index(axes)", f"{MODULES}/test_init_in_shard_map.py"),
    Fault(f"{LAYER}/linen.py", "P(*(split.get(name) for name in self.names))", "P(*(axes for _, axes in self.mesh_axes))", f"{MODULES}/test_placement.py"),
    Fault(f"{LAYER}/linen.py", 'self.sow("losses", name, loss)', 'self.sow("losses", name, 2 * loss)', f"{MODULES}/test_linen.py"),
    Fault(f"{LAYER}/linen.py", "x = in_common_dtype(x, self.dtype, params)", "x = x", f"{MODULES}/test_linen.py"),
    Fault(f"{LAYER}/explicit_mesh.py", "return in_order or not any(_leading(x)[1:])", "return True", f"{MODULES}/test_collectives.py"),
    Fault(f"{LAYER}/explicit_mesh.py", "if mesh is None or _is_in_order(x, in_order):", "if True:", f"{MODULES}/test_explicit_mesh.py"),
    Fault(f"{LAYER}/layer_program.py", "(*split, *(axis for axis in parallel.axes if axis not in split))", "parallel.axes", f"{MODULES}/test_collectives.py"),
    Fault(f"{LAYER}/layer_program.py", "if kind == AxisType.Auto} - axes_of_vmap()", "if kind == AxisType.Auto}", PARALLEL),
    Fault(f"{LAYER}/layer_program.py", "Parallelism(mesh, data=axes) if", "None if", AUTOMATIC),
    Fault(f"{LAYER}/explicit_mesh.py", "(*meshes, jax.sharding.get_abstract_mesh())", "meshes", AUTOMATIC),
    Fault(f"{LAYER}/layer_program.py", " if axis not in axes_of_vmap()", "", AUTOMATIC),
    Fault(f"{LAYER}/experts.py", "experts = when_lowered_unsplit(_warn_of_unsplit, experts)", "pass", AUTOMATIC),
    Fault(f"{LAYER}/nnx.py", "any(was is False for was in sown)", "not all(sown)", f"{MODULES}/test_nnx.py"),
]
# fmt: on


def make(fault: Fault, folder: Path) -> None:
    """Copies the project into `folder`, with the fault.

    Raises:
      ValueError: what the fault replaces does not stand once in its file.
    """
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.file} has {fault.old!r} {text.count(fault.old)} times, must have it once")
    for name in ("blaze_jax", "docs", "pallas_kernels", "tests", "train_example"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder / name)
    (folder / fault.file).write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def noticed(fault: Fault, *arguments: str) -> bool:
    """Whether a test fails in a run of pytest with these arguments."""
    with tempfile.TemporaryDirectory() as name:
        make(fault, Path(name))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
        environment = os.environ | {"PYTHONPATH": name}
        try:
            run = subprocess.run(command, cwd=name, env=environment, capture_output=True, check=False, timeout=SECONDS)
        except subprocess.TimeoutExpired:  # a kernel that waits forever does not pass for a right one
            return True
        if run.returncode not in (0, 1, 5):  # 5: what is named has tests for --all only
            raise RuntimeError(f"{' '.join(command)} ended with status {run.returncode}")
        return run.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--all", action="store_true", help="with every parameter set")
    parser.add_argument(
        "--named", action="store_true", help="with the tests named with each fault, not the whole suite"
    )
    arguments = parser.parse_args()
    options = ["--all"] if arguments.all else []
    chosen = [f for f in FAULTS if not arguments.words or any(w in " ".join(f[:3]) for w in arguments.words)]

    def noticed_where_named(fault):
        return noticed(fault, "-n", "0", *options, *fault.tests.split())

    survivors = []
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(os.cpu_count()) as pool:
        # Most programs are the same with every fault.
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
        for number, (fault, found) in enumerate(zip(chosen, pool.map(noticed_where_named, chosen), strict=True), 1):
            found = found or (not arguments.named and noticed(fault, *options))
            if not found:
                survivors.append(fault)
            print(f"{number}/{len(chosen)} {'noticed' if found else 'SURVIVED'}: {fault.file}: {fault.new}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults noticed")
    return int(len(survivors) > (0 if arguments.all else MAY_SURVIVE * len(chosen)))


if __name__ == "__main__":
    sys.exit(main())
