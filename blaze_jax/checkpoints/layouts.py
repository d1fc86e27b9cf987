"""Public formats of a Mixture-of-Experts block: which tensor holds which parameters, and how; which one a folder has.

`LAYOUTS` describes the formats. `find_block` recognises a layer's format by the names of its tensors, and checks all
their names, types and shapes before anything is read.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from blaze_jax.checkpoints.folder import Folder, Stored, copied
from blaze_jax.config import MoEConfig, Parameter
from blaze_jax.json_file import CheckpointError
from pallas_kernels import codings
from pallas_kernels.codings import FLOAT8_BLOCK, MXFP4_BLOCK, MXFP4_NAN, Coding

SELECTION_BIAS = "selection_bias"
"""The one entry that is state and no parameter of the layer."""

PLAIN = ("F32", "F16", "BF16")

PREFIXES = ("model.layers.{layer}.", "layers.{layer}.")
"""How a layer is named in a model with a head, and in one without, by most families."""

MXFP4_ENDS = ("_blocks", "_scales")
FLOAT8_SCALES = "_scale_inv"
SCALES = (FLOAT8_SCALES, MXFP4_ENDS[1])
"""How names of the scales of compressed tensors end."""


class Tensor(NamedTuple):
    """A tensor of a layout.

    Attributes:
      name: after the block's prefix; "{expert}" stands in it where every expert has its own.
      parameters: what it holds: one, or the gate's and the up projection's.
      outputs_first: whether a matrix lies (out, in) in the file; the layer's parameters are (in, out).
      alternating: whether two parameters take turns along the outputs; otherwise one follows the other.
      mxfp4: whether it is stored as 4-bit numbers in the tensors `name_blocks`, with `name_scales`.
      joined_along: the axis, of a matrix as it lies in the file, along which all experts' matrices follow one another;
        None where they are stacked, or each has a tensor.
      is_row: whether a vector lies as a matrix of one row.
    """

    name: str
    parameters: tuple[str, ...]
    outputs_first: bool = True
    alternating: bool = False
    mxfp4: bool = False
    joined_along: int | None = None
    is_row: bool = False

    @property
    def of_one_expert(self) -> bool:
        return "{expert}" in self.name

    def names(self, num_experts: int) -> list[str]:
        """Returns its names: one for each expert, or a single one."""
        return [self.name.format(expert=expert) for expert in range(num_experts if self.of_one_expert else 1)]

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Returns the shape in the file, as if it were stored as plain numbers."""
        shape = list(parameter.shape[1:] if self.of_one_expert else parameter.shape)
        shape[-1] *= len(self.parameters)
        if self.outputs_first:
            shape[-2:] = reversed(shape[-2:])
        if self.joined_along is not None:
            experts, *shape = shape
            shape[self.joined_along] *= experts
        return (1, *shape) if self.is_row else tuple(shape)

    def of_experts(self, stored: np.ndarray, parameter: Parameter) -> np.ndarray:
        """Returns the tensor with an axis of experts before a matrix, where all of them are in it; no copy."""
        if self.is_row:
            return stored[0]
        if self.joined_along is None:
            return stored
        shape = list(stored.shape)
        experts = parameter.shape[0]
        shape[self.joined_along : self.joined_along + 1] = [experts, shape[self.joined_along] // experts]
        return np.moveaxis(stored.reshape(shape), self.joined_along, 0)

    def view(self, stored: np.ndarray, parameter: str) -> np.ndarray:
        """Returns the part of the tensor that is the parameter, as that has its axes; no copy."""
        if self.outputs_first and stored.ndim > 1:
            stored = stored.swapaxes(-1, -2)
        which, all_of_it = self.parameters.index(parameter), len(self.parameters)
        return stored[..., which::all_of_it] if self.alternating else np.split(stored, all_of_it, axis=-1)[which]

    def join(self, parameters: Sequence[Array]) -> Array:
        """Returns what the file holds of its parameters, or of an expert's: what `of_experts` and `view` take apart."""
        if self.alternating:
            joined = jnp.stack(parameters, axis=-1).reshape(*parameters[0].shape[:-1], -1)
        else:
            joined = jnp.concatenate(parameters, axis=-1)
        joined = joined.mT if self.outputs_first and joined.ndim > 1 else joined
        if self.is_row:
            return joined[None]
        if self.joined_along == 1 and joined.ndim == 3:
            return jnp.moveaxis(joined, 0, 1).reshape(joined.shape[1], -1)
        return joined  # along the first axis, experts follow one another as they do where they are stacked


class Layout(NamedTuple):
    """A public format of the block.

    Attributes:
      name: how it is asked for.
      block: the block's name in the model's layer.
      tensors: what it can hold, the router first.
      use_bias: whether the experts have biases.
      prefixes: how a layer is named in a model with a head, and in one without.
    """

    name: str
    block: str
    tensors: tuple[Tensor, ...]
    use_bias: bool = False
    prefixes: tuple[str, ...] = PREFIXES

    @property
    def router(self) -> str:
        """The name of the router's tensor, after the layer's prefix."""
        return f"{self.block}.{self.tensors[0].name}"

    @property
    def parameters(self) -> set[str]:
        return {parameter for tensor in self.tensors for parameter in tensor.parameters}

    def of(self, parameters: Collection[str]) -> list[Tensor]:
        """Returns the tensors that hold any of the parameters."""
        return [tensor for tensor in self.tensors if set(tensor.parameters) & set(parameters)]

    def names(self, config: MoEConfig, parameters: Collection[str]) -> set[str]:
        """Returns names after the layer's prefix of what holds any of the parameters, without scales of float8."""
        return {
            f"{self.block}.{name}{end}"
            for tensor in self.of(parameters)
            for name in tensor.names(config.num_experts)
            for end in (MXFP4_ENDS if tensor.mxfp4 else ("",))
        }


def _by_expert(gate: str, up: str, down: str) -> tuple[Tensor, ...]:
    names = {"w_gate": gate, "w_up": up, "w_down": down}
    return tuple(Tensor(f"experts.{{expert}}.{name}.weight", (parameter,)) for parameter, name in names.items())


def _fused(*, alternating: bool = False, **options: bool) -> tuple[Tensor, ...]:
    return (
        Tensor("experts.gate_up_proj", ("w_gate", "w_up"), alternating=alternating, **options),
        Tensor("experts.down_proj", ("w_down",), **options),
    )


def _gpt_oss(**options: bool) -> tuple[Tensor, ...]:
    return (
        Tensor("router.weight", ("w_router",)),
        Tensor("router.bias", ("b_router",)),
        *_fused(alternating=True, **options),
        Tensor("experts.gate_up_proj_bias", ("b_gate", "b_up"), outputs_first=False, alternating=True),
        Tensor("experts.down_proj_bias", ("b_down",), outputs_first=False),
    )


def _shared(name: str) -> tuple[Tensor, ...]:
    return tuple(Tensor(f"{name}.{part}_proj.weight", (f"shared_w_{part}",)) for part in ("gate", "up", "down"))


_ROUTER = (Tensor("gate.weight", ("w_router",)), Tensor("gate.e_score_correction_bias", (SELECTION_BIAS,)))
_MIXTRAL = _by_expert("w1", "w3", "w2")
_BY_EXPERT = _by_expert("gate_proj", "up_proj", "down_proj")
_SHARED = _shared("shared_experts")
_GATED_SHARED = (*_shared("shared_expert"), Tensor("shared_expert_gate.weight", ("shared_gate",)))
_ERNIE_BIAS = Tensor("moe_statics.e_score_correction_bias", (SELECTION_BIAS,), is_row=True)
_GRANITE = (
    Tensor("router.layer.weight", ("w_router",)),
    Tensor("input_linear.weight", ("w_gate", "w_up")),
    Tensor("output_linear.weight", ("w_down",)),
)
_DBRX = (
    Tensor("router.layer.weight", ("w_router",)),
    Tensor("experts.mlp.w1", ("w_gate",), joined_along=0),
    Tensor("experts.mlp.v1", ("w_up",), joined_along=0),
    Tensor("experts.mlp.w2", ("w_down",), outputs_first=False, joined_along=0),
)
_BLOCKFFN = (
    Tensor("router_proj.weight", ("w_router",)),
    Tensor("router_norm.weight", ("router_gain",)),
    Tensor("up_proj", ("w_up",), joined_along=0),
    Tensor("down_proj", ("w_down",), joined_along=1),
)

LAYOUTS = {  # by_expert is that of Qwen3-MoE, OLMoE and DeepSeek-V3, fused what transformers 5 holds in memory
    layout.name: layout
    for layout in (
        Layout("mixtral", "block_sparse_moe", _ROUTER[:1] + _MIXTRAL),
        Layout("by_expert", "mlp", _ROUTER + _BY_EXPERT + _SHARED),
        Layout("fused", "mlp", _ROUTER + _fused() + _SHARED),
        Layout("gpt_oss", "mlp", _gpt_oss(outputs_first=False), use_bias=True),
        Layout("gpt_oss_mxfp4", "mlp", _gpt_oss(mxfp4=True), use_bias=True),
        Layout("qwen2_moe", "mlp", _ROUTER + _BY_EXPERT + _GATED_SHARED),
        Layout("qwen2_moe_fused", "mlp", _ROUTER + _fused() + _GATED_SHARED),
        Layout(
            "minimax_m2",
            "block_sparse_moe",
            (*_ROUTER[:1], Tensor("e_score_correction_bias", (SELECTION_BIAS,)), *_MIXTRAL),
        ),
        Layout("ernie4_5_moe", "mlp", (*_ROUTER[:1], _ERNIE_BIAS, *_BY_EXPERT, *_SHARED)),
        Layout("granitemoe", "block_sparse_moe", _GRANITE),
        Layout("dbrx", "ffn", _DBRX, prefixes=("transformer.blocks.{layer}.", "blocks.{layer}.")),
        Layout("blockffn", "mlp", _BLOCKFFN),
    )
}


def entries(config: MoEConfig, width: int, use_bias: bool) -> dict[str, Parameter]:
    """Returns everything a checkpoint holds of a layer: parameters without adapters, and a selection bias if any."""
    found = replace(config, adapter=None).parameters(width, use_bias=use_bias)
    if config.has_selection_bias:
        found[SELECTION_BIAS] = Parameter((config.num_experts,), ("expert",), "bias")
    return found


class Source(NamedTuple):
    """Where an entry of the layer comes from, or one expert's matrix of it.

    Attributes:
      coding: how its numbers are stored.
      tensors: what holds them, and their scales.
      arrays: the entry's own part of each tensor, mapped; with the entry's axes, and a matrix's blocks for its numbers.
    """

    coding: Coding
    tensors: tuple[Stored, ...]
    arrays: tuple[np.ndarray, ...]

    def each(self, change: Callable[[np.ndarray], np.ndarray]) -> "Source":
        """Returns a part of the source, which `change` takes out of each array."""
        return self._replace(arrays=tuple(map(change, self.arrays)))

    def read(self, *wanted: slice) -> tuple[list[np.ndarray], tuple[slice, ...]]:
        """Reads the whole blocks around slices of a matrix; returns also where these lie in what is decoded.

        Raises:
          CheckpointError: a scale is no finite number, which no model has, and which would spoil its block.
        """
        units = self.coding.steps[-1]  # a scale's block is decoded whole
        around = [_blocks(part, unit, unit) for part, unit in zip(wanted, units, strict=True)]
        read = []
        for tensor, array, steps in zip(self.tensors, self.arrays, self.coding.steps, strict=True):
            values = copied(array[tuple(map(_blocks, around, steps))])
            is_scales = len(read) > 0
            if is_scales and np.any(values == MXFP4_NAN if values.dtype == np.uint8 else ~np.isfinite(values)):
                raise CheckpointError(f"{tensor} has scales that are no finite numbers")
            read.append(values)
        inside = zip(wanted, (whole.start for whole in around), strict=True)
        return read, tuple(slice(part.start - start, part.stop - start) for part, start in inside)


def _blocks(part: slice, size: int, scale: int = 1) -> slice:
    """Returns the blocks of that size that a part touches, times `scale`."""
    return slice(part.start // size * scale, -(-part.stop // size) * scale)


class Block(NamedTuple):
    """One layer's block of experts in a folder.

    Attributes:
      layout: its format.
      entries: shapes of everything that the layer has.
      sources: by entry, one for each expert's matrix or a single one; a selection bias that is not there is zero.
    """

    layout: Layout
    entries: dict[str, Parameter]
    sources: dict[str, list[Source]]


def find_block(folder: Folder, layer: int, config: MoEConfig) -> Block:
    """Returns the block of experts of that layer; CheckpointError unless its tensors are those of the configuration."""
    layout, prefix = _find_layout(folder, layer, config)
    expected = entries(config, folder[prefix + layout.tensors[0].name].shape[1], layout.use_bias)
    if homeless := sorted(expected.keys() - layout.parameters - {SELECTION_BIAS}):
        raise CheckpointError(f"{folder.origin}: layer {layer}: the layout {layout.name!r} has no {homeless[0]}")
    sources = {SELECTION_BIAS: [Source(codings.UNCODED, (), (np.zeros(config.num_experts, np.float32),))]}
    for tensor in layout.of(expected):
        names = [prefix + name for name in tensor.names(config.num_experts)]
        if tensor.parameters == (SELECTION_BIAS,) and names[0] not in folder:
            continue
        found = [_find_source(folder, name, tensor, expected[tensor.parameters[0]]) for name in names]
        if found[0].arrays[0].ndim == 3:
            found = [found[0].each(itemgetter(expert)) for expert in range(config.num_experts)]
        for name in tensor.parameters:
            sources[name] = [source.each(partial(tensor.view, parameter=name)) for source in found]
    return Block(layout, expected, sources)


def block_names(layer: int) -> tuple[str, ...]:
    """Returns how the names of a block's tensors start, in any layout and model."""
    return tuple(
        f"{form.format(layer=layer)}{layout.block}." for layout in LAYOUTS.values() for form in layout.prefixes
    )


def _find_layout(folder: Folder, layer: int, config: MoEConfig) -> tuple[Layout, str]:
    """Returns the layout whose tensors are there, and the prefix of their names."""
    where = f"{folder.origin}: layer {layer}"
    forms = dict.fromkeys(form for layout in LAYOUTS.values() for form in layout.prefixes)
    forms = [form for form in forms if any(name.startswith(form.format(layer=layer)) for name in folder.names)]
    if len(forms) != 1:
        prefixes = " and ".join(repr(form.format(layer=layer)) for form in forms)
        raise CheckpointError(f"{where} " + (f"is there as {prefixes}" if forms else "has no tensors: no such layer"))
    prefix = forms[0].format(layer=layer)
    layouts = [layout for layout in LAYOUTS.values() if forms[0] in layout.prefixes]
    present = {name.removeprefix(prefix) for name in folder.names if name.startswith(block_names(layer))}
    if not any(".experts." in name for name in present) and present.isdisjoint(layout.router for layout in layouts):
        raise CheckpointError(f"{where} has no experts" + ": it is dense" * ("mlp.gate_proj.weight" in present))
    _check_experts(folder, prefix, present, config)
    known = {layout.name: layout.names(config, layout.parameters) for layout in layouts}
    best = max(known, key=lambda name: (len(known[name] & present), -len(known[name])))
    layout = LAYOUTS[best]
    names = layout.names(config, entries(config, 1, layout.use_bias))
    fields = ("num_experts", "activation", "shared_width", "shared_gate", "has_selection_bias", "router_bias")
    wanted = f"the layout {best!r} with {', '.join(f'{name}={getattr(config, name)!r}' for name in fields)}"
    if unknown := sorted(present - names - {name + FLOAT8_SCALES for name in names}):
        if others := [other for other in known if other != best and unknown[0] in known[other] - known[best]]:
            what = f"is there in two layouts, {best!r} and {others[0]!r}: tensor {prefix + unknown[0]!r}"
            raise CheckpointError(f"{where} {what}")
        raise CheckpointError(f"{where}: tensor {prefix + unknown[0]!r} has no place in {wanted}")
    optional = set() if config.selection_bias else layout.names(config, [SELECTION_BIAS])
    if missing := sorted(names - present - optional):
        raise CheckpointError(f"{where}: tensor {prefix + missing[0]!r} is missing in {wanted}")
    if config.selection_bias and not layout.of([SELECTION_BIAS]):
        raise CheckpointError(
            f"{where}: the layout {best!r} has no selection bias, and selection_bias=True asks for the file's; "
            "a bias_update_rate alone starts one at zero"
        )
    return layout, f"{prefix}{layout.block}."


def _check_experts(folder: Folder, prefix: str, present: set[str], config: MoEConfig) -> None:
    """Raises CheckpointError unless there are as many experts, for each of which names are looked for then."""
    routers = {layout.router for layout in LAYOUTS.values()} & present
    for router in (folder[prefix + name] for name in sorted(routers)):
        if len(router.shape) != 2 or min(router.shape) < 1 or router.shape[0] != config.num_experts:
            raise CheckpointError(f"{router} has shape {router.shape}, must have ({config.num_experts}, width)")
    if not routers and config.num_experts > len(present):
        raise CheckpointError(
            f"{folder.origin}: {prefix} has no router, and no tensors of {config.num_experts} experts"
        )


def _find_source(folder: Folder, name: str, tensor: Tensor, parameter: Parameter) -> Source:
    """Returns the source of a whole tensor, after checks of its types and shapes."""
    shape = tensor.shape(parameter)
    if tensor.mxfp4:
        *leading, inputs = shape
        blocks, scales = (folder[name + end] for end in MXFP4_ENDS)
        if inputs % MXFP4_BLOCK:
            raise CheckpointError(f"{blocks}: {inputs} inputs of an expert are no multiple of {MXFP4_BLOCK}")
        blocks.require(["U8"], (*leading, inputs // MXFP4_BLOCK, MXFP4_BLOCK // 2))
        scales.require(["U8"], (*leading, inputs // MXFP4_BLOCK))
        return Source(codings.MXFP4, (blocks, scales), (blocks.mapped().reshape(*leading, -1), scales.mapped()))
    values, scale_name = folder[name], name + FLOAT8_SCALES
    compressible = parameter.kind == "kernel" and len(shape) == 2 and tensor.joined_along is None
    if values.dtype == "F8_E4M3" and compressible:
        values.require(["F8_E4M3"], shape)
        _check_block_size(folder)
        scales = folder[scale_name]
        scales.require(["F32"], [-(-size // FLOAT8_BLOCK) for size in shape])
        return Source(codings.FLOAT8, (values, scales), (values.mapped(), scales.mapped()))
    if scale_name in folder:
        raise CheckpointError(f"{values} has dtype {values.dtype}, but {scale_name!r} holds scales of F8_E4M3")
    values.require((*PLAIN, "F8_E4M3") if compressible else PLAIN, shape)
    return Source(codings.UNCODED, (values,), (tensor.of_experts(values.mapped(), parameter),))


def _check_block_size(folder: Folder) -> None:
    path = folder.path / "config.json"
    match folder.read_config() if path.exists() else {}:
        case {"quantization_config": {"weight_block_size": size}} if size not in (None, [FLOAT8_BLOCK, FLOAT8_BLOCK]):
            found = f"quantization_config's weight_block_size={size}"
            raise CheckpointError(f"{path}: {found}, must be {[FLOAT8_BLOCK, FLOAT8_BLOCK]}")
