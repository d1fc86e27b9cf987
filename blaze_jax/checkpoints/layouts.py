"""How public formats lay out a Mixture-of-Experts block: which tensor holds which parameters, and how."""

from collections.abc import Collection
from typing import NamedTuple

from blaze_jax.config import MoEConfig, Parameter

SELECTION_BIAS = "selection_bias"
"""The one entry that is state and no parameter of the layer."""


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
        """Names in the file, without the block's prefix and without scales of float8."""
        ends = ("_blocks", "_scales") if self.mxfp4 else ("",)
        experts = range(num_experts if self.of_one_expert else 1)
        return [self.name.format(expert=expert) + end for expert in experts for end in ends]

    def outputs(self, parameter: str, width: int, chosen: slice) -> slice:
        """Where the outputs `chosen` of a parameter lie in the tensor; `width` is the number of all its outputs."""
        which = self.parameters.index(parameter)
        step = len(self.parameters) if self.alternating else 1
        first = which if self.alternating else which * width
        return slice(first + step * chosen.start, first + step * (chosen.stop - 1) + 1, step)

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Shape in the file, as if it were stored as plain numbers."""
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
        return next(tensor for tensor in self.tensors if tensor.parameters == ("w_router",))

    def of(self, parameters: Collection[str]) -> list[Tensor]:
        """Tensors that hold any of the parameters."""
        return [tensor for tensor in self.tensors if set(tensor.parameters) & set(parameters)]


def _by_expert(gate: str, up: str, down: str) -> tuple[Tensor, ...]:
    names = {"w_gate": gate, "w_up": up, "w_down": down}
    return tuple(Tensor(f"experts.{{expert}}.{name}.weight", (parameter,)) for parameter, name in names.items())


_ROUTER = (Tensor("gate.weight", ("w_router",)), Tensor("gate.e_score_correction_bias", (SELECTION_BIAS,)))
_SHARED = tuple(Tensor(f"shared_experts.{name}_proj.weight", (f"shared_w_{name}",)) for name in ("gate", "up", "down"))
_ROUTER_WITH_BIAS = (Tensor("router.weight", ("w_router",)), Tensor("router.bias", ("b_router",)))
_BIASES = (
    Tensor("experts.gate_up_proj_bias", ("b_gate", "b_up"), alternating=True),
    Tensor("experts.down_proj_bias", ("b_down",)),
)


def _gpt_oss_experts(**options: bool) -> tuple[Tensor, ...]:
    return (
        Tensor("experts.gate_up_proj", ("w_gate", "w_up"), alternating=True, **options),
        Tensor("experts.down_proj", ("w_down",), **options),
    )


LAYOUTS = {  # by_expert is that of Qwen3-MoE, OLMoE and DeepSeek-V3, fused what transformers 5 holds in memory
    layout.name: layout
    for layout in (
        Layout("mixtral", "block_sparse_moe", _ROUTER[:1] + _by_expert("w1", "w3", "w2")),
        Layout("by_expert", "mlp", _ROUTER + _by_expert("gate_proj", "up_proj", "down_proj") + _SHARED),
        Layout(
            "fused",
            "mlp",
            (
                *_ROUTER,
                Tensor("experts.gate_up_proj", ("w_gate", "w_up")),
                Tensor("experts.down_proj", ("w_down",)),
                *_SHARED,
            ),
        ),
        Layout("gpt_oss", "mlp", _ROUTER_WITH_BIAS + _gpt_oss_experts(outputs_first=False) + _BIASES, use_bias=True),
        Layout("gpt_oss_mxfp4", "mlp", _ROUTER_WITH_BIAS + _gpt_oss_experts(mxfp4=True) + _BIASES, use_bias=True),
    )
}


def entries(config: MoEConfig, width: int, use_bias: bool) -> dict[str, Parameter]:
    """Everything a checkpoint holds of a layer: its parameters, and the selection bias where there is one."""
    found = config.parameters(width, use_bias=use_bias)
    if config.has_selection_bias:
        found[SELECTION_BIAS] = Parameter((config.num_experts,), ("expert",), "bias")
    return found
