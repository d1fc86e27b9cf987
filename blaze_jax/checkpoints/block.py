"""The tensors of one layer in a folder, found by their names and checked before anything is read."""

from collections.abc import Collection
from functools import partial
from typing import NamedTuple

from blaze_jax.checkpoints.decode import FLOAT8_BLOCK, MXFP4_BLOCK
from blaze_jax.checkpoints.errors import CheckpointError
from blaze_jax.checkpoints.folder import Folder, Stored
from blaze_jax.checkpoints.layouts import LAYOUTS, SELECTION_BIAS, Layout, Tensor, entries
from blaze_jax.config import MoEConfig, Parameter

PLAIN = ("F32", "F16", "BF16")

PREFIXES = ("model.layers.{layer}.", "layers.{layer}.")
"""How a layer is named in a model with a head, and in one without."""

SCALES = ("_scale_inv", "_scales")
"""How names of the scales of compressed tensors end."""


class Source(NamedTuple):
    """Where an entry of the layer comes from; with one for each expert, those of one expert.

    Attributes:
      tensor: how the entry lies in it.
      values: the numbers.
      scales: of compressed numbers; None for plain ones.
    """

    tensor: Tensor
    values: Stored
    scales: Stored | None = None


class Block(NamedTuple):
    """One layer's block of experts in a folder.

    Attributes:
      layout: its format.
      width: d, the width of a token.
      entries: shapes of everything that the layer has.
      sources: by entry, one for each expert or a single one; none for a selection bias that starts at zero.
    """

    layout: Layout
    width: int
    entries: dict[str, Parameter]
    sources: dict[str, list[Source]]


def find_block(folder: Folder, layer: int, config: MoEConfig) -> Block:
    """The block of experts of that layer; CheckpointError unless its tensors are those of the configuration."""
    layout, prefix = _find_layout(folder, layer, config)
    width = folder[prefix + layout.router.name].shape[1]
    expected = entries(config, width, layout.use_bias)
    sources = {}
    for tensor in layout.of(expected):
        if tensor.parameters == (SELECTION_BIAS,) and prefix + tensor.name not in folder:
            continue
        find = partial(_find_source, folder, prefix, tensor, expected[tensor.parameters[0]])
        found = [find(expert) for expert in range(config.num_experts if tensor.of_one_expert else 1)]
        sources |= dict.fromkeys(tensor.parameters, found)
    return Block(layout, width, expected, sources)


def block_names(prefix: str) -> tuple[str, ...]:
    """How the names of a block's tensors start in any layout, after the layer's prefix."""
    return tuple({f"{prefix}{layout.block}." for layout in LAYOUTS.values()})


def _find_layout(folder: Folder, layer: int, config: MoEConfig) -> tuple[Layout, str]:
    """The layout whose tensors are there, and the prefix of their names."""
    where = f"{folder.origin}: layer {layer}"
    prefixes = [prefix.format(layer=layer) for prefix in PREFIXES]
    prefixes = [prefix for prefix in prefixes if any(name.startswith(prefix) for name in folder.names)]
    if len(prefixes) != 1:
        what = "is there twice, with and without 'model.'" if prefixes else "has no tensors: no such layer"
        raise CheckpointError(f"{where} {what}")
    prefix = prefixes[0]
    present = {name.removeprefix(prefix) for name in folder.names if name.startswith(block_names(prefix))}
    if not any(".experts." in name for name in present):
        dense = "mlp.gate_proj.weight" in present
        raise CheckpointError(f"{where} has no experts" + (": it is dense" if dense else ""))
    _check_experts(folder, prefix, present, config)
    known = {name: _names(layout, config, _all_entries(layout)) for name, layout in LAYOUTS.items()}
    best = max(known, key=lambda name: (len(known[name] & present), -len(known[name])))
    layout = LAYOUTS[best]
    names = _names(layout, config, entries(config, 1, layout.use_bias))
    unknown = sorted(name for name in present - names if not _is_scale(name, names))
    if unknown:
        first = prefix + unknown[0]
        if others := [other for other in known if other != best and unknown[0] in known[other] - known[best]]:
            raise CheckpointError(f"{where} is there in two layouts, {best!r} and {others[0]!r}: tensor {first!r}")
        raise CheckpointError(f"{where}: tensor {first!r} has no place in {_shape_of(layout, config)}")
    optional = set() if config.selection_bias else _names(layout, config, [SELECTION_BIAS])
    if missing := sorted(names - present - optional):
        raise CheckpointError(f"{where}: tensor {prefix + missing[0]!r} is missing in {_shape_of(layout, config)}")
    if config.selection_bias and not layout.of([SELECTION_BIAS]):
        raise CheckpointError(
            f"{where}: the layout {layout.name!r} has no selection bias, and selection_bias=True asks for the file's; "
            "a bias_update_rate alone starts one at zero"
        )
    return layout, f"{prefix}{layout.block}."


def _check_experts(folder: Folder, prefix: str, present: set[str], config: MoEConfig) -> None:
    """Raises CheckpointError unless there are as many experts, for each of which names are looked for then."""
    routers = {f"{layout.block}.{layout.router.name}" for layout in LAYOUTS.values()} & present
    for router in [folder[prefix + name] for name in sorted(routers)]:
        if len(router.shape) != 2 or min(router.shape) < 1 or router.shape[0] != config.num_experts:
            raise CheckpointError(f"{router} has shape {router.shape}, must have ({config.num_experts}, width)")
    if not routers and config.num_experts > len(present):
        raise CheckpointError(
            f"{folder.origin}: {prefix} has no router, and no tensors of {config.num_experts} experts"
        )


def _find_source(folder: Folder, prefix: str, tensor: Tensor, parameter: Parameter, expert: int) -> Source:
    """The source of an expert, or that of all of them, after checks of its types and shapes."""
    name = prefix + tensor.name.format(expert=expert)
    shape = tensor.shape(parameter)
    if tensor.mxfp4:
        *leading, inputs = shape
        blocks, scales = folder[name + "_blocks"], folder[name + "_scales"]
        if inputs % MXFP4_BLOCK:
            raise CheckpointError(f"{blocks}: {inputs} inputs of an expert are no multiple of {MXFP4_BLOCK}")
        blocks.require(["U8"], (*leading, inputs // MXFP4_BLOCK, MXFP4_BLOCK // 2))
        scales.require(["U8"], (*leading, inputs // MXFP4_BLOCK))
        return Source(tensor, blocks, scales)
    values = folder[name]
    compressible = parameter.kind == "kernel" and len(shape) == 2
    scale_name = name + "_scale_inv"
    if values.dtype == "F8_E4M3" and compressible:
        values.require(["F8_E4M3"], shape)
        _check_block_size(folder)
        scales = folder[scale_name]
        scales.require(["F32"], [-(-size // FLOAT8_BLOCK) for size in shape])
        return Source(tensor, values, scales)
    if scale_name in folder:
        raise CheckpointError(f"{values} has dtype {values.dtype}, but {scale_name!r} holds scales of F8_E4M3")
    values.require((*PLAIN, "F8_E4M3") if compressible else PLAIN, shape)
    return Source(tensor, values)


def _check_block_size(folder: Folder) -> None:
    if not (folder.path / "config.json").exists():
        return
    quantization = folder.read_config().get("quantization_config") or {}
    size = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if size not in (None, [FLOAT8_BLOCK, FLOAT8_BLOCK]):
        found = f"quantization_config's weight_block_size={size}"
        raise CheckpointError(f"{folder.path / 'config.json'}: {found}, must be {[FLOAT8_BLOCK, FLOAT8_BLOCK]}")


def _shape_of(layout: Layout, config: MoEConfig) -> str:
    """What the tensors should be those of."""
    fields = ("num_experts", "activation", "shared_width", "has_selection_bias", "router_bias")
    found = ", ".join(f"{name}={getattr(config, name)!r}" for name in fields)
    return f"the layout {layout.name!r} with {found}"


def _names(layout: Layout, config: MoEConfig, parameters: Collection[str]) -> set[str]:
    """Names of the tensors of those entries, after the layer's prefix."""
    tensors = layout.of(parameters)
    return {f"{layout.block}.{name}" for tensor in tensors for name in tensor.names(config.num_experts)}


def _all_entries(layout: Layout) -> set[str]:
    return {parameter for tensor in layout.tensors for parameter in tensor.parameters} | {SELECTION_BIAS}


def _is_scale(name: str, names: set[str]) -> bool:
    return name.removesuffix("_scale_inv") in names and name.endswith("_scale_inv")
