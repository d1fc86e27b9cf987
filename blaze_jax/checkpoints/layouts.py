"""Public formats of a Mixture-of-Experts block: which tensor holds which parameters, and how; which one a folder has.

`LAYOUTS` describes the formats. `find_block` recognises a layer's format by the names of its tensors, and checks all
their names, types and shapes before anything is read.
"""

from collections.abc import Collection
from functools import partial
from typing import NamedTuple

from blaze_jax.checkpoints.decode import FLOAT8_BLOCK, MXFP4_BLOCK
from blaze_jax.checkpoints.folder import Folder, Stored
from blaze_jax.config import MoEConfig, Parameter
from blaze_jax.json_file import CheckpointError

SELECTION_BIAS = "selection_bias"
"""The one entry that is state and no parameter of the layer."""

PLAIN = ("F32", "F16", "BF16")

PREFIXES = ("model.layers.{layer}.", "layers.{layer}.")
"""How a layer is named in a model with a head, and in one without."""

SCALES = ("_scale_inv", "_scales")
"""How names of the scales of compressed tensors end."""


class Tensor(NamedTuple):
    """A tensor of a layout.

    Attributes:
      name: after the block's prefix; "{expert}" stands in it where every expert has its own.
      parameters: what it holds: one, or the gate's and the up projection's.
      outputs_first: whether a matrix lies (out, in) in the file; the layer's parameters are (in, out).
      alternating: whether two parameters take turns along the outputs; otherwise one follows the other.
      mxfp4: whether it is stored as 4-bit numbers in the tensors `name_blocks`, with `name_scales`.
    """

    name: str
    parameters: tuple[str, ...]
    outputs_first: bool = True
    alternating: bool = False
    mxfp4: bool = False

    @property
    def of_one_expert(self) -> bool:
        return "{expert}" in self.name

    def names(self, num_experts: int) -> list[str]:
        """Returns names in the file, without the block's prefix and without scales of float8."""
        ends = ("_blocks", "_scales") if self.mxfp4 else ("",)
        experts = range(num_experts if self.of_one_expert else 1)
        return [self.name.format(expert=expert) + end for expert in experts for end in ends]

    def outputs(self, parameter: str, width: int, chosen: slice) -> slice:
        """Returns where the outputs `chosen` of a parameter lie in the tensor; `width` counts all its outputs."""
        which = self.parameters.index(parameter)
        step = len(self.parameters) if self.alternating else 1
        first = which if self.alternating else which * width
        return slice(first + step * chosen.start, first + step * (chosen.stop - 1) + 1, step)

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Returns the shape in the file, as if it were stored as plain numbers."""
        *leading, outputs = parameter.shape
        if self.of_one_expert:
            leading = leading[1:]
        outputs *= len(self.parameters)
        if leading and self.outputs_first and parameter.kind != "bias":
            return (*leading[:-1], outputs, leading[-1])
        return (*leading, outputs)


class Layout(NamedTuple):
    """A public format of the block.

    Attributes:
      name: how it is asked for.
      block: the block's name in the model's layer.
      tensors: what it can hold.
      use_bias: whether the experts have biases.
    """

    name: str
    block: str
    tensors: tuple[Tensor, ...]
    use_bias: bool = False

    @property
    def router(self) -> Tensor:
        return self.of(["w_router"])[0]

    def of(self, parameters: Collection[str]) -> list[Tensor]:
        """Returns the tensors that hold any of the parameters."""
        return [tensor for tensor in self.tensors if set(tensor.parameters) & set(parameters)]

    def names(self, config: MoEConfig, parameters: Collection[str]) -> set[str]:
        """Returns names of the tensors that hold any of the parameters, after the layer's prefix."""
        tensors = self.of(parameters)
        return {f"{self.block}.{name}" for tensor in tensors for name in tensor.names(config.num_experts)}


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
        Tensor("experts.gate_up_proj_bias", ("b_gate", "b_up"), alternating=True),
        Tensor("experts.down_proj_bias", ("b_down",)),
    )


_ROUTER = (Tensor("gate.weight", ("w_router",)), Tensor("gate.e_score_correction_bias", (SELECTION_BIAS,)))
_SHARED = tuple(Tensor(f"shared_experts.{name}_proj.weight", (f"shared_w_{name}",)) for name in ("gate", "up", "down"))

LAYOUTS = {  # by_expert is that of Qwen3-MoE, OLMoE and DeepSeek-V3, fused what transformers 5 holds in memory
    layout.name: layout
    for layout in (
        Layout("mixtral", "block_sparse_moe", _ROUTER[:1] + _by_expert("w1", "w3", "w2")),
        Layout("by_expert", "mlp", _ROUTER + _by_expert("gate_proj", "up_proj", "down_proj") + _SHARED),
        Layout("fused", "mlp", _ROUTER + _fused() + _SHARED),
        Layout("gpt_oss", "mlp", _gpt_oss(outputs_first=False), use_bias=True),
        Layout("gpt_oss_mxfp4", "mlp", _gpt_oss(mxfp4=True), use_bias=True),
    )
}


def entries(config: MoEConfig, width: int, use_bias: bool) -> dict[str, Parameter]:
    """Returns everything a checkpoint holds of a layer: its parameters, and the selection bias where there is one."""
    found = config.parameters(width, use_bias=use_bias)
    if config.has_selection_bias:
        found[SELECTION_BIAS] = Parameter((config.num_experts,), ("expert",), "bias")
    return found


class Source(NamedTuple):
    """Where an entry of the layer comes from; with one for each expert, those of one expert.

    Attributes:
      tensor: how the entry lies in it.
      values: the numbers.
      scales: scales of compressed numbers; None for plain ones.
    """

    tensor: Tensor
    values: Stored
    scales: Stored | None = None


class Block(NamedTuple):
    """One layer's block of experts in a folder.

    Attributes:
      layout: its format.
      entries: shapes of everything that the layer has.
      sources: by entry, one for each expert or a single one; none for a selection bias that starts at zero.
    """

    layout: Layout
    entries: dict[str, Parameter]
    sources: dict[str, list[Source]]


def find_block(folder: Folder, layer: int, config: MoEConfig) -> Block:
    """Returns the block of experts of that layer; CheckpointError unless its tensors are those of the configuration."""
    layout, prefix = _find_layout(folder, layer, config)
    expected = entries(config, folder[prefix + layout.router.name].shape[1], layout.use_bias)
    sources = {}
    for tensor in layout.of(expected):
        if tensor.parameters == (SELECTION_BIAS,) and prefix + tensor.name not in folder:
            continue
        find = partial(_find_source, folder, prefix, tensor, expected[tensor.parameters[0]])
        found = [find(expert) for expert in range(config.num_experts if tensor.of_one_expert else 1)]
        sources |= dict.fromkeys(tensor.parameters, found)
    return Block(layout, expected, sources)


def block_names(prefix: str) -> tuple[str, ...]:
    """Returns how the names of a block's tensors start in any layout, after the layer's prefix."""
    return tuple({f"{prefix}{layout.block}." for layout in LAYOUTS.values()})


def _find_layout(folder: Folder, layer: int, config: MoEConfig) -> tuple[Layout, str]:
    """Returns the layout whose tensors are there, and the prefix of their names."""
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
    known = {}
    for layout in LAYOUTS.values():
        everything = {parameter for tensor in layout.tensors for parameter in tensor.parameters}
        known[layout.name] = layout.names(config, everything)
    best = max(known, key=lambda name: (len(known[name] & present), -len(known[name])))
    layout = LAYOUTS[best]
    names = layout.names(config, entries(config, 1, layout.use_bias))
    fields = ("num_experts", "activation", "shared_width", "has_selection_bias", "router_bias")
    wanted = f"the layout {best!r} with {', '.join(f'{name}={getattr(config, name)!r}' for name in fields)}"
    if unknown := sorted(present - names - {name + SCALES[0] for name in names}):
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
    routers = {f"{layout.block}.{layout.router.name}" for layout in LAYOUTS.values()} & present
    for router in [folder[prefix + name] for name in sorted(routers)]:
        if len(router.shape) != 2 or min(router.shape) < 1 or router.shape[0] != config.num_experts:
            raise CheckpointError(f"{router} has shape {router.shape}, must have ({config.num_experts}, width)")
    if not routers and config.num_experts > len(present):
        raise CheckpointError(
            f"{folder.origin}: {prefix} has no router, and no tensors of {config.num_experts} experts"
        )


def _find_source(folder: Folder, prefix: str, tensor: Tensor, parameter: Parameter, expert: int) -> Source:
    """Returns the source of an expert, or that of all of them, after checks of its types and shapes."""
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
    scale_name = name + SCALES[0]
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
    quantization = folder.read_config().get("quantization_config")
    size = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if size not in (None, [FLOAT8_BLOCK, FLOAT8_BLOCK]):
        found = f"quantization_config's weight_block_size={size}"
        raise CheckpointError(f"{folder.path / 'config.json'}: {found}, must be {[FLOAT8_BLOCK, FLOAT8_BLOCK]}")
