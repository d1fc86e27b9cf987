"""Whether the tests notice faults: `python -m tests.faults [--cases WHICH] [--named] [WORD ...]` makes them, one at a time, in a copy.

Each fault changes one expression of a function. The tests that should notice it run first, a process for each core, and
only if they pass, the whole suite; what no test notices is reported, and more than a few of those is an error. With
words, only faults whose function or text has one of them.
"""

# ruff: noqa: E501  (a fault is a line)

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SCOPES = (ast.FunctionDef, ast.ClassDef)
PACKAGES = ("blaze_jax", "pallas_kernels", "train_example")
MAY_SURVIVE = 0.1  # of the faults, the default suite; more cases must notice every one
SECONDS = 1800  # of a run of the tests at most


class Fault(NamedTuple):
    """In a function, class or constant, `old` becomes `new`; the files test_NAME.py of `tests` should notice it.

    The function is known by its name, with the end of its module's or class's where others are called so, too. `old`
    is to stand in it once, however it is formatted and wherever it moves; if it is renamed, once in the project.
    """

    function: str
    old: str
    new: str
    tests: str


# fmt: off
FAULTS = [Fault(*fault) for fault in [
    # the router and its losses
    ("_select", "ranking = jnp.where(ranking == 0, 0, ranking)", "ranking = ranking", "routing router"),
    ("_select", "jnp.where(best == -jnp.inf, EMPTY_SLOT,", "jnp.where(best == jnp.inf, EMPTY_SLOT,", "routing router"),
    ("_select", "ranking = jnp.where(logits == -jnp.inf, -jnp.inf, ranking)", "ranking = ranking", "routing router"),
    ("_keep_best_groups", "top_k(grouped, min(rule.scores_per_group, grouped.shape[-1]))", "top_k(grouped, 1)", "routing router"),
    ("_weights", "return rule.scale * jnp.where(values", "return jnp.where(values", "routing router"),
    ("balance_loss", "return demand.shape[0] * jnp.vdot(share", "return jnp.vdot(share", "routing router"),
    ("mean_losses", "jnp.square(jax.nn.logsumexp(logits, axis=-1))", "jax.nn.logsumexp(logits, axis=-1)", "routing router"),
    ("mean_losses", "entropy=-jnp.sum(", "entropy=jnp.sum(", "routing router"),
    ("router_backward", "losses_vjp((d_losses, d_probability))[0] + common_vjp(d_common)[0]", "losses_vjp((d_losses, d_probability))[0]", "routing router"),
    ("_past_the_last", "return jnp.where(experts == EMPTY_SLOT, num_experts, experts)", "return experts", "routing router"),
    ("MAX_EXPERTS", "MAX_EXPERTS = 1024", "MAX_EXPERTS = 512", "router routing_hopper"),
    # experts of one neuron
    ("best_pairs", "rank[:, None] * rank[None] <= number", "rank[:, None] * rank[None] < number", "atomic_experts"),
    ("best_pairs", "lax.sort((-sums, ids), dimension=1, num_keys=2)", "lax.sort((-sums, ids), dimension=1, num_keys=1)", "atomic_experts"),
    ("atomic_experts._route", "number / jnp.maximum(number - 1, 1)", "number / jnp.maximum(number, 1)", "atomic_experts"),
    ("_added_by_expert", "begins = lax.cummax(jnp.where(goes_on & (last == 0), -1, run))", "begins = lax.cummax(run)", "atomic_experts"),
    ("_added_by_expert", "target = target.at[:, 0].set(jnp.where(goes_on, -1, target[:, 0]))", "target = target", "atomic_experts"),
    ("_grid", "rows = jnp.where(slot == jnp.arange(slots, dtype=jnp.int32), row, side)", "rows = row", "atomic_experts"),
    # what comes after the choice
    ("_drop_beyond_capacity", "rank < capacity", "rank <= capacity", "token_counts routing"),
    ("_route", "tokens_per_expert = jnp.minimum(demand, capacity)", "tokens_per_expert = demand", "token_counts routing"),
    ("_route", "weights = jnp.where(experts == EMPTY_SLOT, 0, weights)", "weights = weights", "token_counts routing"),
    ("update_selection_bias", "return selection_bias + rate * jnp.sign(demand.mean() - demand)", "return selection_bias - rate * jnp.sign(demand.mean() - demand)", "token_counts routing modules"),
    ("_product_of_parts", "products[-2::-1]", "products[-3::-1]", "router_product"),
    ("router_product._backward", "(dy2, w1)", "(dy1, w1)", "router_product"),
    ("rule", "experts_per_token > 1 if self.normalize_weights is None", "True if self.normalize_weights is None", "token_counts routing"),
    ("_losses", "num_tokens *= devices", "devices = devices", "meshes"),
    ("routing._losses", "balance if experts_per_token is None else balance * share", "balance", "routing router"),
    ("for_phase", "token_rounding=None, ", "", "layer"),
    ("_route", "grouped = None", "pass", "grouped_once routing_hopper"),
    ("_compute", "if grouped and grouped.kernels.dispatch is kernels.dispatch:", "if grouped:", "grouped_once"),
    ("_Program.layer", '"grouped": grouped', '"grouped": None', "grouped_once"),
    ("_round_token_counts", "wanted = -(-demand // tile) * tile if mode", "wanted = demand // tile * tile if mode", "token_counts routing"),
    ("_round_token_counts", "(demand + tile // 2) // tile * tile", "(demand + tile // 2 - 1) // tile * tile", "token_counts routing"),
    ("_round_token_counts", 'last_resort = demand if mode == "up" else down', "last_resort = down", "token_counts routing"),
    ("_round_token_counts", "scores = jnp.where(jnp.isnan(scores), 0, scores)", "scores = scores", "token_counts routing"),
    ("token_cutoffs", "jnp.argmax(equal_so_far >= (wanted - larger)", "jnp.argmax(equal_so_far > (wanted - larger)", "token_selection token_counts"),
    ("take", "(token <= self.tokens[expert])", "(token < self.tokens[expert])", "token_selection token_counts"),
    # the dispatch
    ("count_by_comparison", "earlier = (place[None] < place[:, None])[None]", "earlier = (place[None] <= place[:, None])[None]", "dispatch"),
    ("dispatch", "aligned_sizes = -(-group_sizes // row_alignment) * row_alignment", "aligned_sizes = group_sizes", "dispatch"),
    ("dispatch", "pairs_before_tile = jnp.cumsum(counts, axis=0) - counts", "pairs_before_tile = jnp.cumsum(counts, axis=0)", "dispatch"),
    ("dispatch", "jnp.where(tiles < num_experts, rows, num_rows)", "rows", "dispatch"),
    ("walk", "lower_lanes = (simt.Int(1) << self.lane) - 1", "lower_lanes = simt.Int(1) << self.lane", "dispatch"),
    ("known_expert", "select((expert >= 0) & (expert < num_experts), expert, num_experts)", "select(expert < num_experts, expert, num_experts)", "dispatch"),
    ("check_ids", "wrong = (values < EMPTY_SLOT) | (values >= num_experts)", "wrong = values >= num_experts", "dispatch experts_errors"),
    # the loops over rows
    ("_for_each_batch", "mine = (row >= wanted[:, None]) & (row < end[:, None])", "mine = row < end[:, None]", "loops experts products"),
    ("_for_each_batch", "tiles = ((end - first).max() + turn.rows - 1) // turn.rows", "tiles = (end - first).max() // turn.rows", "loops experts products"),
    ("_for_each_batch", "tiles = ((end - first).max() +", "tiles = ((end - first).min() +", "loops experts products"),
    ("_for_each_batch", "busy = (load > 0).sum(dtype=jnp.int32)", "busy = (load > 1).sum(dtype=jnp.int32)", "loops experts products"),
    ("read_own_rows", "return jnp.where(tile.mine, read_rows(array, tile), 0)", "return read_rows(array, tile)", "loops experts products"),
    ("product", "preferred_element_type=accumulator_dtype(lhs.dtype)", "preferred_element_type=lhs.dtype", "products"),
    ("sum_rows", "accumulator_dtype(o.dtype, *read), groups, like)", "o.dtype, groups, like)", "products experts"),
    # each term of the VJP, portable
    ("down_backward", "d_weight = (d_hidden * hidden).sum(-1, keepdims=True)", "d_weight = d_hidden.sum(-1, keepdims=True)", "products experts"),
    ("down_backward", "d_weight += product(dy_rows, own[1][:, None], 2, 2)", "d_weight += 0", "products experts"),
    ("down_backward", "activation_vjp(weight * d_hidden), weight * hidden", "activation_vjp(d_hidden), weight * hidden", "products experts"),
    ("down_backward", "activation_vjp(weight * d_hidden), weight * hidden", "activation_vjp(weight * d_hidden), hidden", "products experts"),
    ("down_weight_gradients", "_column_sums(weight * dy_rows", "_column_sums(dy_rows", "products experts"),
    ("scaled_up_projection", "pre = [p + b for p, b in zip(pre, own_biases, strict=True)] if own_biases else pre", "pre = pre", "products experts"),
    ("combine", "weights[:, slot, None].astype(wide) * row", "row", "combine experts"),
    ("combine_columns", "carry[0] < width, turn,", "carry[0] <= width - block, turn,", "experts"),
    ("_weights_of_parts", "jnp.where(tokens.experts < num_experts, tokens.weights, jnp.nan)", "tokens.weights", "experts_errors experts"),
    ("_forward", 'if plan.save != "inputs":', "if True:", "experts_memory"),
    ("_pre_activations_and_hidden", "partial(_up_projection, True), partial(_up_projection, False))", "partial(_up_projection, True))", "experts_memory"),
    # pre-activations in 8 bits
    ("quantization_scales", "jnp.where(largest < jnp.inf, scales, jnp.full_like(scales, jnp.nan))", "scales", "quantized"),
    ("_up_projection", 'keep and plan.save == "int8"', "False", "experts_memory"),
    ("_forward", "return tuple(map(checkpoint_name, arrays, names))", "return arrays", "experts_memory"),
    ("_compute", "checkpoint_name((dispatch, most_pairs), INDEX_NAME)", "(dispatch, most_pairs)", "experts_memory"),
    # the Hopper kernels, interpreted
    ("slot", "gather.wait_landed(self.refs.landed, number, turn & 1)", "pass", "products interpreter"),
    ("half", "rows = jnp.clip(self.rows - first, 0, GROUP_ROWS)", "rows = jnp.clip(self.rows, 0, GROUP_ROWS)", "tile_queue products"),
    ("one", "self.release(step + self.stages - 1)", "self.release(step)", "products"),
    ("store_through", "plgpu.wait_smem_to_gmem(1, wait_read_only=True)", "plgpu.wait_smem_to_gmem(2, wait_read_only=True)", "products interpreter"),
    ("down_backward", "d_weight += (d_hidden * hidden).sum(axis=1)", "d_weight = (d_hidden * hidden).sum(axis=1)", "products"),
    ("only_valid", "lax.cond(valid_rows < self.rows,", "lax.cond(valid_rows < 0,", "products weight_gradients"),
    ("_silu_jvp", "sigmoid + silu * (1 - sigmoid)", "sigmoid + silu * sigmoid", "activations"),
    ("down_backward", "value_and_gradients(activation, pre, weight * d_hidden)", "value_and_gradients(activation, pre, d_hidden)", "products"),
    ("multiply", "@pl.when(tile.end - row < K_STEP)", "@pl.when(tile.end - row < 0)", "products weight_gradients"),
    ("fill", "row = jnp.where(k + 1 < steps, row, start_of(following))", "row = row", "products tile_queue"),
    ("_wait", "plgpu.barrier_wait(self.refs.handed.at[place])", "pass", "tile_queue products"),
    ("_hand", "pl.when(turn >= PLACES)(lambda: plgpu.barrier_wait(self.refs.taken.at[place]))", "pass", "tile_queue products"),
    ("find", "is_one, number = number < tiles,", "is_one, number = number <= tiles,", "tile_queue"),
    ("combine", "addend.load_vector(Long(token) * columns + column, COLUMNS).wide()", "sums", "combine"),
    ("combine", "jnp.zeros(shape, wide) if addend is None else addend.astype(wide)", "jnp.zeros(shape, wide)", "combine"),
    ("combine", "values = select(is_slot, values, Vector.zeros(rows.kind, COLUMNS))", "pass", "combine"),
    ("combine", "select(is_slot, shuffle(factor, slot), 0.0)", "shuffle(factor, slot)", "combine"),
    ("combine", "counts = counts | ~factor.equals(factor)", "pass", "combine"),
    ("combine", "lanes_where(counts & (lane < size))", "lanes_where(counts)", "combine"),
    ("find", "if self.used is None else refs.used[0]", "if self.used is None else refs.used[0] - 1", "tile_queue"),
    # the kernels for Ampere, interpreted
    ("sum_products", "ahead = ring.tile.stages - 1", "ahead = ring.tile.stages", "tiles"),
    ("wait", "wait_for_copies(self.tile.stages - 2)", "wait_for_copies(self.tile.stages - 1)", "tiles"),
    ("wait", "simt.block_barrier()", "pass", "tiles"),
    ("sum_products", "state = operands.state(following + 1)", "state = operands.state(following)", "products weight_gradients"),
    ("traced", "jax.sharding.use_abstract_mesh(_NO_MESH)", "jax.named_scope('')", "elementwise"),
    ("kernel_launch", "arrays = vary_over(arrays, varying_axes(arrays))", "pass", "launches"),
    ("sweep_columns", "simt.block_barrier()  # all have left", "0  # all have left", "tiles"),
    ("sweep_columns", "if not ring_is_free or each == 1:", "if each == 1:", "tiles"),
    ("row_matmul", "start_piece(column_tile, step - k.number)", "start_piece(sweep, step - k.number)", "tiles"),
    ("halves", "column_tile * width + later + self.panel * PANEL", "column_tile * width + self.panel * PANEL", "products weight_gradients combine"),
    ("row_matmul", "ring.wait()", "pass", "products weight_gradients combine"),
    ("load_rows", "tensor_operand(load_matrices(rows, word + start), tile.kind)", "load_matrices(rows, word + start)", "float32"),
    ("load_columns", "tensor_operand(load_matrices(columns, word + first * tile.row_words), tile.kind)", "load_matrices(columns, word + first * tile.row_words)", "float32"),
    ("copy_rows", "all_or_none(first + chunk_elements < k.depth, valid_rows - row) > i * apart", "valid_rows - row > i * apart", "edges"),
    ("copy_panels", "all_or_none(step_row + row < k.depth, Int(end) - column) > later", "Int(end) - column > later", "products weight_gradients combine"),
    ("choose", "select(second, step - self.of_pair, step) * self.tile.depth", "step * self.tile.depth", "experts"),
    ("load_panels", "return tensor_operand([registers[i] for i in ((0, 2, 1, 3) if left else range(4))], tile.kind)", "return [registers[i] for i in ((0, 2, 1, 3) if left else range(4))]", "float32"),
    ("panel_word", "else row % 8", "else row % 4", "tiles"),
    ("load_panels", "(lane % 8 + lane // 16 * 8, lane // 8 % 2) if left", "(lane % 16, lane // 16) if left", "products weight_gradients combine"),
    ("start", "known = (of_warp < where.rows) & (column < self.columns)", "known = column < self.columns", "edges"),
    ("word", "else (row >> 1) % 4", "else row % 4", "tiles"),
    ("abreast", "across = minimum(Int(row_tiles) - first, rows)", "across = Int(rows)", "products weight_gradients combine"),
    ("_row_contraction", "known = (row < end) & (token >= 0)", "known = (row <= end) & (token >= 0)", "products weight_gradients combine"),
    ("down_backward", "row_weights[2 * of_rows + i]", "row_weights[of_rows + i]", "products weight_gradients combine"),
    ("up_projection", "[add_bias(values, own) for", "[add_bias(add_bias(values, own), own) for", "tiles"),
    ("store_rows", "(row < where.rows) & (own < num_columns)", "(row <= where.rows) & (own < num_columns)", "products weight_gradients combine"),
    ("mma_heuristic", "block_kib(capability) > 99", "block_kib(capability) >= 99", "tuning"),
    ("launch", "memories[after].accesses = memories[after - updated].accesses", "pass", "language"),
    # tokens in ranges
    ("dispatch", "jnp.where(tokens < own.shape[0], number * self.size + tokens, self.num_tokens)", "number * self.size + tokens", "token_ranges"),
    ("token_sums", "0 if tokens.first is None else tokens.first", "0", "token_ranges"),
    ("_gradients_in_ranges", "GradientSums(d_params, given.first)", "given", "token_ranges"),
    ("token_ranges", "max(RANGE_BYTES // row_bytes, ROWS_PER_EXPERT", "min(RANGE_BYTES // row_bytes, ROWS_PER_EXPERT", "token_ranges"),
    ("_dtypes", "accumulator_dtype(array.dtype) if plan.ranges else array.dtype", "array.dtype", "token_ranges"),
    # over devices
    ("token_sums", "there if addend is None else addend + there", "addend", "pieces"),
    ("token_sums", "arriving.append(reduce(jnp.add, departed)", "arriving.append(departed[0]", "pieces"),
    ("token_sums", "y = done = finished(y, operands, number - 1)", "y = done = finished(None, operands, number - 1)", "pieces"),
    ("_other_gradients", "else d_weights + of_slots", "else of_slots", "meshes"),
    ("experts_here", "first = lax.axis_index(self.expert) * num_experts", "first = lax.axis_index(self.group) * num_experts", "meshes"),
    ("in_parts", "windows.start[p::parts]", "windows.start[::parts]", "parts"),
    ("in_parts", "tokens = groups.expert_token_indices - p * size", "tokens = groups.expert_token_indices % size", "parts"),
    ("routing.dispatch.of_experts", "first if counted_from is None else counted_from", "first", "parts"),
    ("of_experts", "values.at[before + tile].get", "values.at[tile].get", "parts"),
    ("block_arrives", "group=self.fsdp, shift=-block", "group=self.fsdp, shift=block", "pieces"),
    ("by_block", "(experts - first) % num_experts", "experts", "pieces"),
    ("block_departs", "group=self.fsdp, shift=block)", "group=self.fsdp, shift=-block)", "pieces"),
    ("departures", "group=self.group, shift=-shift) for", "group=self.group, shift=shift) for", "collectives"),
    ("_in_the_order_of_the_mesh", "devices.transpose([ordered.index(axis) for axis in group])", "devices", "collectives"),
    ("by_block", "return jnp.where(known, (experts", "return jnp.where(experts < num_experts, (experts", "collectives"),
    ("splits_experts", "return all(_has(spec[0], self.fsdp) and", "return all(True or", "collectives"),
    ("experts_here", "most_pairs = jnp.max(", "most_pairs = jnp.min(", "collectives"),
    ("turns", "rows, axes = tokens.most_pairs + groups * (ROW_MULTIPLE - 1),", "rows, axes = tokens.most_pairs,", "collectives"),
    ("_down_backward", "Journeys((*to_come(transport, [params.down]), *to_come(transport, params.ups)))", "Journeys((*to_come(transport, params.ups), *to_come(transport, [params.down])))", "pieces"),
    ("to_come", "partial(transport.block_arrives, pair, block)", "partial(transport.block_arrives, pair, 1)", "pieces"),
    ("_weight_gradients", "own[i % len(own)] = _sum(own[i % len(own)], gradients)", "own[i % len(own)] = gradients", "pieces"),
    ("up_projection", 'in_place={"into": "written"}', "in_place={}", "parts"),
    ("_rotations", "return tuple(_rotated(tokens, self.group, shift) for shift in range(self.devices))", "return tuple(_rotated(tokens, self.group, shift) for shift in range(self.devices))[::-1]", "meshes"),
    ("experts_here", "unknown = experts >= num_experts * self.expert_devices", "unknown = experts < 0", "parallelism"),
    ("compute_experts", "jnp.where(lax.axis_index(tensor) == 0, b_down, 0)", "b_down", "meshes"),
    ("turns", "turns = lax.pmax(vary_over(turns, axes), tuple(sorted(axes)))", "turns = lax.pmin(vary_over(turns, axes), tuple(sorted(axes)))", "meshes"),
    ("_gradients_of_turns", "before = dx, GradientSums(d_params, sums.first), d_weights", "before = None, sums, None", "meshes"),
    ("_weight_gradients", "[known.down, *known.ups][len(own) :][: len(gradients)]", "[known.down, *known.ups][: len(gradients)]", "meshes"),
    ("_route", "(routed.experts != EMPTY_SLOT).any(1), slots", "jnp.ones(num_tokens, bool), slots", "token_counts routing meshes"),
    ("quantize_columns", "warp_barrier()", "None", "fp8"),
    ("quantize_columns", "wait_for_copies(slots - 1 - unit)", "wait_for_copies(slots - unit)", "fp8"),
    ("quantize_columns", "turn % 2 * (warps * columns)", "turn * 0", "fp8"),
    ("quantize_rows", "[(outputs[0], i * packed)", "[(outputs[0], 0)", "fp8"),
    ("quantize_rows", "pitch = width if in_place", "pitch = packed if in_place", "fp8"),
    ("with_casts", "replace(cast, weight=weight) if is_cast(cast) else weight", "cast if is_cast(cast) else weight", "casts"),
    ("check_casts", "given[0].bounded != bounded", "False", "casts"),
    ("rounding_operands", "return tuple(decoded(weight.backward, dtype) for weight in weights)", "return tuple(decoded(weights[0].backward, dtype) for weight in weights)", "casts"),
    ("why_fp8_loses", "expected_rows * width * model_width < LEAST_PRODUCTS", "False", "precision"),
    ("down_weights", "paired=bounded", "paired=False", "fp8"),
    ("step._apart", "None if is_expert else param", "param", "gradient_sums"),
    ("_surroundings", "around = family_in_demand(), is_fp8_everywhere(), forced_turn()", "around = ()", "eager precision"),
    ("_surroundings", "None if are_observers() or sums_on_offer() else", "", "eager"),
    ("traced_once", "jax.jit(run, static_argnames=settings, inline=INLINE_WHILE_TRACING if inlined else False)", "run", "eager"),
    ("as_on_all", "lax.pmean if jnp.issubdtype", "lax.psum if jnp.issubdtype", "meshes"),
    ("row_range", "(place >= 0) & (place < offsets[-1])", "place >= 0", "parts"),
    # generation with a cache
    ("AdaptedProjection.__call__", "self.adapter.scale * (", "(", "fine_tuning"),
    ("_merged_attention", "scale * jnp.matmul", "jnp.matmul", "fine_tuning"),
    ("Attention.mixed", "jnp.arange(key.shape[1]) <= positions[..., None]", "jnp.arange(key.shape[1]) < positions[..., None]", "generate"),
    ("_apply", "filled=state.filled + count", "filled=state.filled + tokens.shape[1]", "generate"),
    ("candidates", "before < sampling.top_p", "before + probabilities < sampling.top_p", "generate"),
    ("Block.__call__", '"mask": context.real(x.shape[1])', '"mask": None', "generate"),
    ("next_tokens", "jnp.where(stopped, 0,", "jnp.where(False, 0,", "generate"),
    ("plus_chunk", "each * number", "each", "chunks"),
    ("own_experts", "experts < first + number", "experts <= first + number", "chunks"),
    ("plus_chunk", "total + sums[0]", "sums[0]", "chunks"),
    ("plus_chunk", "own == EMPTY_SLOT, axis=1", "own != EMPTY_SLOT, axis=1", "chunks"),
    ("step_of_chunk", "number < chunks - 1", "number < chunks - 2", "streaming"),
    ("make_plan", "units = sizes.layers * chunks", "units = sizes.layers", "plan"),
    # compressed weights
    ("one_form_in_16s", "weight.form == form and", "", "decoding"),
    ("ampere.decoding.in_order", "divmod(2 * pair + last, 4)", "divmod(2 * last + pair, 4)", "decoding"),
    ("Codes.copies", "(index < self.outputs) & (first + row * self.of_byte < end)", "index < self.outputs", "decoding"),
    ("Codes._scales_of_columns", "+ k // self.of_scale", "+ k // 128", "decoding"),
    ("Codes._transposed", ">> quad % 2 * 16", ">> 0", "decoding"),
    ("TileDecoder.fetch", "place = k * rows, column", "place = rows, column", "decoding"),
    ("decoded_products", "slot.wait_for_rows()", "pass", "decoding"),
    ("decoded_products", "decoder.load(refs, slot, own + 1)", "decoder.load(refs, slot, own)", "decoding"),
    ("DecodedPanelRowMatmul.multiply_rows", "self.release, refs, mine", "refs.ring.release, mine", "decoding"),
    ("DecodedRowMatmul.multiply_rows", "plgpu.wait_smem_to_gmem(0, wait_read_only=True)", "pass", "decoding"),
    ("of_blocks", "interleaved(blocks.T).T", "blocks", "decoding"),
    ("encode_nf4", "[place]", "[15 - place]", "codings"),
    ("Plan.decoded", "self.delayed(projections, *before)", "projections", "quantized_weights"),
    # public checkpoints
    ("_halves", "4 * lax", "4 - 4 * lax", "codings"),
    ("decode_mxfp4", "_select(scale == MXFP4_NAN", "_select(scale == 256", "codings"),
    ("view", "if self.alternating else np.split", "if False else np.split", "load parity"),
    ("_fused", 'Tensor("experts.gate_up_proj", ("w_gate", "w_up"), alt', 'Tensor("experts.gate_up_proj", ("w_up", "w_gate"), alt', "load parity"),
    ("_MIXTRAL", '_by_expert("w1", "w3", "w2")', '_by_expert("w3", "w1", "w2")', "load parity"),
    ("of_experts", "np.moveaxis(stored.reshape(shape), self.joined_along, 0)", "stored.reshape(shape)", "load parity"),
    ("join", "jnp.moveaxis(joined, 0, 1).reshape", "joined.reshape", "save"),
    ("_outside_of_a_range", "(n + 1) % step", "n % step", "config"),
    ("_blocks", "-(-part.stop // size) * scale", "part.stop // size * scale", "load parity"),
    ("Source.read", "slice(part.start - start, part.stop - start)", "slice(0, part.stop - part.start)", "load parity"),
    ("_load_kernels", "part.start - start", "part.start", "load"),
    ("_empty", "start = -memory.ctypes.data % 64", "start = -memory.ctypes.data % 64 + 2", "load"),
    ("require", "if self.shape != tuple(shape):", "if len(self.shape) != len(tuple(shape)):", "errors"),
    ("_stays_inside", 'or ".." in path.parts', "", "errors"),
    ("_find_layout", "if missing := sorted(names - present - optional):", "if missing := []:", "errors"),
    ("Source.read", "~np.isfinite(values)", "np.isposinf(values)", "errors"),
    ("__init__", "if body + start != at:", "if body + start < at:", "errors"),
    ("check_all_known", "if self._values.get(name) and not", "if name in self._values and not", "config"),
    ("_find_layout", "optional = set() if config.selection_bias else", "optional = set() if config.has_selection_bias else", "save"),
    ("_listed_or_between", "(n + 1) % step", "n % step", "config"),
    ("_write_index", "rename(unfinished, folder / INDEX)", 'rename(unfinished, folder / "index")', "save"),
    ("rename", "os.fsync(folder)", "pass", "save"),
    ("check_hashes", "digest != saved[name]", "not digest", "save"),
    ("write_tensors", "stack.enter_context(locked(folder))", "pass", "save"),
    ("_free_path", "TensorFile(path).tensors.keys() <= names", "False", "save"),
    ("write_tensors", "elif len(kept) < len(file.tensors):", "elif False:", "save"),
    # the layer and its modules
    ("shared_experts", 'names = ("shared_w_gate", "shared_w_up")', 'names = ("shared_w_up", "shared_w_gate")', "layer"),
    ("_entropy_of_mean", "return -jnp.sum(", "return jnp.sum(", "dense_training"),
    ("_choice", "~(values < router.threshold)", "~(values > router.threshold)", "dense_training"),
    ("compute_all_experts", "lax.axis_index(expert) * num_experts", "0 * lax.axis_index(expert)", "dense_training"),
    ("_seeds", "lax.axis_index(axes) * number", "0 * lax.axis_index(axes)", "jitter"),
    ("for_phase", "jitter=0.0, ", "", "jitter"),
    ("for_kernels", "b * adapter.scale", "b", "adapters"),
    ("for_kernels", "own_part(a[None], P(None, *specs[weight][1:2]))", "a[None]", "adapters"),
    ("gradients", "by_row, **one", "groups, **one", "adapters"),
    ("down_backward", "row_weights.astype(wide)[:, None] * d_hidden", "d_hidden", "adapters"),
    ("down_backward", "(d_hidden * hidden).sum(-1)", "0 * d_hidden.sum(-1)", "adapters"),
    ("frozen", "lax.stop_gradient(p)", "p", "adapters"),
    ("_joined", "if other == part else np.zeros_like(b)", "if other != part else np.zeros_like(b)", "peft"),
    ("_check_others", "not of_layer and name not in modules", "False", "peft"),
    ("_check_others", "int(of_layer[1]) == layer", "False", "peft"),
    ("_check_shapes", "given.get(path) != wanted.get(path)", "False", "fine_tuning"),
    ("_p_norm", "scale * jnp.power(", "jnp.power(", "routing"),
    ("specs", '"latent": fsdp}', '"latent": ()}', "latent"),
    ("dense_ffn", "gate * result", "result", "layer"),
    ("call_layer", "moves = train and config.bias_update_rate", "moves = config.bias_update_rate", "modules"),
    ("after", "demand = self.demand + demand", "demand = demand", "shared_calls"),
    ("skipped", "accumulator_dtype(x.dtype), math.prod", "jnp.float32, math.prod", "shared_calls"),
    ("own_part", "lax.axis_index(axes) * size", "0 * lax.axis_index(axes)", "parallelism"),
    ("get_sharding", "P(*(split.get(name) for name in self.names))", "P(*(axes for _, axes in self.mesh_axes))", "parallelism"),
    ("__call__", 'self.sow("losses", name, loss)', 'self.sow("losses", name, 2 * loss)', "modules"),
    ("call_layer", "x = in_common_dtype(x, module.dtype, params)", "x = x", "modules"),
    ("applied", "mask = some if mask is None else mask & some", "mask = some", "given_routing"),
    ("applied", "jnp.where(again, logits.shape[1], ids)", "ids", "given_routing"),
    ("applied", "jnp.where(mask[:, None], logits, -jnp.inf)", "logits", "given_routing"),
    ("layer", "tokens = jnp.where(given.mask[:, None], tokens, 0)", "pass", "given_routing"),
    ("layer", "y if given.mask is None else jnp.where(given.mask[:, None], y, 0)", "y", "given_routing"),
    ("_choice", "active = ~(ranking <= 0)", "active = ranking > 0", "open_ended_routers"),
    ("_surprise", "& (segments[..., :-1] == segments[..., 1:])", "", "neighbour_losses"),
    ("_over_mesh", "jnp.pad(ids, ((0, padding), (0, 0)), constant_values=EMPTY_SLOT)", "jnp.pad(ids, ((0, padding), (0, 0)))", "given_routing"),
    ("_is_in_order", "return in_order or not any(_leading(x)[1:])", "return True", "collectives"),
    ("tokens_in_order", "if mesh is None or _is_in_order(x, in_order):", "if True:", "meshes"),
    ("devices_of", "(*split, *(axis for axis in axes if axis not in split))", "axes", "collectives"),
    ("devices_of", "- axes_of_vmap()", "", "meshes"),
    ("devices_of", "if may_split else set()", "if not may_split else set()", "meshes"),
    ("meshes_of", "(*meshes, jax.sharding.get_abstract_mesh())", "meshes", "meshes"),
    ("devices_of", "free = free.union(split) -", "free = free -", "meshes"),
    ("_compute", "experts = when_lowered_unsplit(_warn_of_unsplit, experts)", "pass", "meshes"),
    ("__call__", "any(was is False for was in sown)", "not all(sown)", "modules"),
]]
# fmt: on


class Definition(NamedTuple):
    """Where a function, class or constant is defined, the name with its module's."""

    name: str
    path: Path
    text: str
    start: int
    end: int


def definitions() -> list[Definition]:
    """Everything that has a name in the project, but for local variables."""
    found = []
    for path in sorted(p.relative_to(ROOT) for package in PACKAGES for p in (ROOT / package).rglob("*.py")):
        text = (ROOT / path).read_text(encoding="utf-8")
        starts = list(accumulate(map(len, text.splitlines(keepends=True)), initial=0))
        nodes = [(ast.parse(text), ".".join(path.with_suffix("").parts))]
        for node, name in nodes:  # which grow meanwhile
            for child in ast.iter_child_nodes(node):
                own = child.name if isinstance(child, SCOPES) else None
                if isinstance(child, ast.Assign | ast.AnnAssign) and isinstance(node, ast.Module | ast.ClassDef):
                    own = getattr(child.targets[0] if isinstance(child, ast.Assign) else child.target, "id", None)
                if own:
                    first = min(part.lineno for part in (child, *getattr(child, "decorator_list", ())))
                    found.append(Definition(f"{name}.{own}", path, text, starts[first - 1], starts[child.end_lineno]))
                nodes.append((child, f"{name}.{own}" if isinstance(child, SCOPES) else name))
    return found


def place(fault: Fault, among: list[Definition]) -> tuple[Path, int, int]:
    """File, start and end of what the fault replaces.

    Raises:
      ValueError: it does not stand once in the functions of that name, nor, if there are none, in the project.
    """
    words = re.findall(r"\w+|[^\w\s]", fault.old)
    old = re.compile(r"\s*".join(rf",?\s*{re.escape(w)}" if w in ")]}" else re.escape(w) for w in words))
    named = [definition for definition in among if f".{definition.name}".endswith(f".{fault.function}")]
    found = {
        (definition.path, *match.span())
        for definition in named or among
        for match in old.finditer(definition.text, definition.start, definition.end)
    }
    if len(found) != 1:
        raise ValueError(f"{fault.function} has {fault.old!r} {len(found)} times, must have it once")
    return found.pop()


def make(fault: Fault, folder: Path) -> None:
    """Copies the project into `folder`, with the fault."""
    path, start, end = place(fault, definitions())
    for name in (*PACKAGES, "docs", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder / name)
    text = (ROOT / path).read_text(encoding="utf-8")
    (folder / path).write_text(text[:start] + fault.new + text[end:], encoding="utf-8")


def files(name: str) -> list[str]:
    """Tests of that name, in any folder."""
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob(f"test_{name}.py"))]


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
        if run.returncode not in (0, 1, 5):  # 5: what is named has slow tests only
            raise RuntimeError(f"{' '.join(command)} ended with status {run.returncode}")
        return run.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--cases", choices=("few", "some", "all"), default="few", help="as pytest takes it")
    parser.add_argument("--named", action="store_true", help="with the tests named with each fault alone")
    arguments = parser.parse_args()
    options = ["--cases", arguments.cases]
    chosen = [f for f in FAULTS if not arguments.words or any(w in " ".join(f[:3]) for w in arguments.words)]

    def noticed_where_named(fault):
        return noticed(fault, "-n", "0", *options, *(file for name in fault.tests.split() for file in files(name)))

    survivors = []
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(os.cpu_count()) as pool:
        # Most programs are the same with every fault.
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
        for number, (fault, found) in enumerate(zip(chosen, pool.map(noticed_where_named, chosen), strict=True), 1):
            found = found or (not arguments.named and noticed(fault, *options))
            if not found:
                survivors.append(fault)
            outcome = "noticed" if found else "SURVIVED"
            print(f"{number}/{len(chosen)} {outcome}: {fault.function}: {fault.new}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults noticed")
    return int(len(survivors) > (MAY_SURVIVE * len(chosen) if arguments.cases == "few" else 0))


if __name__ == "__main__":
    sys.exit(main())
