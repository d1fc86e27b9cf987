"""Layers as the `config.json` of a public model describes them.

`read_public_model` reads the file; a function for each family takes the fields that decide the layer's mathematics,
each with its type checked. Fields that nobody took are passed over, unless their name says that they could change the
layer.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blaze_jax.activations import clamped_swiglu
from blaze_jax.checks import shown
from blaze_jax.json_file import CheckpointError, read_json
from blaze_jax.router import Router

FLOAT8_BLOCK = 128
"""Rows, and columns, of float8 that share a scale, in the files of DeepSeek-V3 and of Qwen."""


@dataclass(frozen=True, kw_only=True)
class PublicModel[Config]:
    """A model as its `config.json` describes it.

    Attributes:
      family: the file's model_type: mixtral, qwen3_moe, olmoe, deepseek_v3, kimi_k2, glm4_moe or gpt_oss.
      width: d, the width of a token.
      num_layers: how many layers it has.
      dense_layers: numbers of those without experts, from 0.
      dense_width: hidden width of the dense layers; None for a family that has none.
      use_bias: whether the experts have biases, an argument of the modules.
      layer: the `MoEConfig` of its Mixture-of-Experts layers.
    """

    family: str
    width: int
    num_layers: int
    dense_layers: tuple[int, ...]
    dense_width: int | None
    use_bias: bool
    layer: Config


def read_public_model[Config](
    config: Mapping[str, Any] | str | Path, make_layer: Callable[..., Config]
) -> PublicModel[Config]:
    """Returns the model that a `config.json`, its folder or its content describes; see `checkpoints.read_model`.

    `make_layer` is `MoEConfig`, which this module does not know: that class reads public files by this function.
    """
    where = "config"
    if not isinstance(config, Mapping):
        where = Path(config) / "config.json" if Path(config).is_dir() else Path(config)
        config = read_json(where)
    fields = Fields(config, str(where))
    family = fields.choice("model_type", list(_FAMILIES))
    num_layers = fields.count("num_hidden_layers", most=_MOST_LAYERS)
    experts_per_token = fields.count_of_any("num_experts_per_tok", "experts_per_token")
    adds_losses = fields.boolean("output_router_logits", default=False)
    weight = fields.number("router_aux_loss_coef", 0.0) if adds_losses else 0.0
    try:
        dense_layers, options = _FAMILIES[family](fields, num_layers)
        if "activation" not in options:
            options["activation"] = _ACTIVATIONS[fields.choice("hidden_act", list(_ACTIVATIONS))]
        layer = make_layer(
            num_experts=fields.count_of_any("num_local_experts", "num_experts", "n_routed_experts"),
            experts_per_token=experts_per_token,
            expert_width=fields.count("intermediate_size" if dense_layers is None else "moe_intermediate_size"),
            # transformers counts each of a token's choices as one, and all layers as one.
            load_balancing_weight=weight * experts_per_token / max(num_layers - len(dense_layers or ()), 1),
            **options,
        )
    except CheckpointError:
        raise
    except ValueError as error:  # of the layer's own checks
        raise CheckpointError(f"{where}: no layer of this library fits it: {error}") from error
    model = PublicModel(
        family=family,
        width=fields.count("hidden_size"),
        num_layers=num_layers,
        dense_layers=dense_layers or (),
        dense_width=None if dense_layers is None else fields.count("intermediate_size"),
        use_bias="router_bias" in options,
        layer=layer,
    )
    fields.check_all_known(family)
    return model


_MISSING = object()
_LARGEST_COUNT = 2**31 - 1
_MOST_LAYERS = 10_000
"""No model has near as many, and what has a loop over them ends soon."""

_TOUCHES_THE_LAYER = re.compile(
    r"expert|moe|rout|mlp|ffn|glu|top_?k|quant"
    r"|(?<![a-z])(act|bias|capacity|clamp|compress|dense|drop(?!out)|feed|ff|gat(e|ing)|group|hidden|inner|intermediate"
    r"|jitter|multipl|nois|normali|renorm|scal|scor|select|shar|sparse)"
)
"""Words of which one stands in the name of each field that changed such a layer so far."""

_OF_OTHER_PARTS = {"attention_bias", "chunk_size_feed_forward", "output_hidden_states", "output_router_logits"}
_OF_OTHER_PARTS |= {"qkv_bias", "rope_scaling", "router_aux_loss_coef"}
"""Fields of attention, or of what a model returns, whose names have such a word."""


class Fields:
    """The fields of a `config.json`, which notes those that were asked for.

    Args:
      values: the file's content.
      where: the file, in errors.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self._where, self._known = values, where, set()

    def count(self, name: str, default: Any = _MISSING, *, least: int = 1, most: int = _LARGEST_COUNT) -> int:
        rule = f"an integer from {least} to {most}"
        return self._get(name, default, lambda value: _is_number(value, int) and least <= value <= most, rule)

    def count_of_any(self, *names: str) -> int:
        """Returns a number that has several names, of which releases of transformers write some or all."""
        first, *others = [name for name in names if name in self._values] or names[:1]
        count = self.count(first)
        for name in others:
            self._get(name, None, lambda value: _is_number(value, int) and value == count, f"{first}={count}")
        return count

    def counts(self, name: str, below: int) -> list[int]:
        """Returns numbers of layers; none where the field is null or missing."""

        def holds(value):
            return value is None or (isinstance(value, list) and all(type(v) is int and 0 <= v < below for v in value))

        return self._get(name, None, holds, f"a list of integers from 0 to {below - 1}") or []

    def number(self, name: str, default: Any = _MISSING, *, positive: bool = False) -> float:
        def holds(value):  # an integer may have hundreds of digits
            return _is_number(value, int | float) and abs(value) <= sys.float_info.max and (value > 0 or not positive)

        return float(self._get(name, default, holds, "a positive number" if positive else "a finite number"))

    def boolean(self, name: str, default: Any = _MISSING) -> bool:
        return self._get(name, default, lambda value: isinstance(value, bool), "true or false")

    def choice(self, name: str, allowed: list, default: Any = _MISSING) -> Any:
        def holds(value):
            return any(value == right and isinstance(value, bool) == isinstance(right, bool) for right in allowed)

        return self._get(name, default, holds, " or ".join(map(str, allowed)))

    def check_quantization(self, **expected: Any) -> None:
        """Raises CheckpointError if the file tells of compression by another method, or in another way."""

        def holds(value):
            return value is None or (isinstance(value, Mapping) and dict(value) | expected == expected | dict(value))

        self._get("quantization_config", None, holds, f"null, or have {expected}")

    def check_all_known(self, family: str) -> None:
        """Raises CheckpointError if a field that nobody asked for could change the layer.

        Its name has a word for a part of the layer then, and its value is not null, false, zero or empty, which leave
        out what the family has not. Other fields say something of other parts of a model. So do names that begin with
        an underscore, which transformers uses for itself.
        """
        for name in sorted(map(str, self._values.keys() - self._known - _OF_OTHER_PARTS)):
            words = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
            if self._values.get(name) and not name.startswith("_") and _TOUCHES_THE_LAYER.search(words):
                printable = name.encode("ascii", "backslashreplace").decode()
                raise CheckpointError(
                    f"{self._where}: {printable}={shown(self._values[name])} is unknown to {family}, and could change "
                    "the layer; leave it out if it does not"
                )

    def _get(self, name: str, default: Any, holds: Callable[[Any], bool], rule: str) -> Any:
        """Returns the field's value, or the default; CheckpointError unless the rule holds for it."""
        self._known.add(name)
        value = self._values.get(name, default)
        if not holds(value):
            found = f"={shown(value)}" if name in self._values else " is missing,"
            raise CheckpointError(f"{self._where}: {name}{found} must be {rule}")
        return value


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


type _Family = tuple[tuple[int, ...] | None, dict[str, Any]]
"""The layers without experts, None for a family that has none; and arguments of the layer."""


def _mixtral(fields: Fields, num_layers: int) -> _Family:
    fields.choice("router_jitter_noise", [0], 0)
    fields.choice("norm_topk_prob", [True], True)
    return None, {"router": Router(normalize_weights=True)}


def _olmoe(fields: Fields, num_layers: int) -> _Family:
    return None, {"router": Router(normalize_weights=fields.boolean("norm_topk_prob"))}


def _qwen3_moe(fields: Fields, num_layers: int) -> _Family:
    fields.check_quantization(**_FLOAT8)
    router = Router(normalize_weights=fields.boolean("norm_topk_prob"))
    step = fields.count("decoder_sparse_step", 1)
    listed = set(fields.counts("mlp_only_layers", num_layers))
    return tuple(n for n in range(num_layers) if n in listed or (n + 1) % step), {"router": router}


def _deepseek_v3(fields: Fields, num_layers: int) -> _Family:
    """Describes Kimi-K2 and GLM-4.5, too, which have its layer; what GLM-4.5 leaves out has one value there."""
    fields.choice("scoring_func", ["sigmoid"], "sigmoid")
    fields.choice("topk_method", ["noaux_tc"], "noaux_tc")
    fields.choice("moe_layer_freq", [1], 1)
    fields.check_quantization(**_FLOAT8)
    router = Router(
        scoring="sigmoid",
        normalize_weights=fields.boolean("norm_topk_prob"),
        weight_scale=fields.number("routed_scaling_factor"),
        num_groups=fields.count("n_group"),
        groups_per_token=fields.count("topk_group"),
    )
    shared_width = fields.count("n_shared_experts", least=0) * fields.count("moe_intermediate_size")
    dense_layers = tuple(range(min(fields.count("first_k_dense_replace", least=0), num_layers)))
    return dense_layers, {"router": router, "shared_width": shared_width, "selection_bias": True}


def _gpt_oss(fields: Fields, num_layers: int) -> _Family:
    fields.check_quantization(quant_method="mxfp4")
    fields.choice("norm_topk_prob", [True], True)
    fields.choice("hidden_act", ["silu"])
    activation = clamped_swiglu(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    return None, {"router": Router(scoring="softmax_selected"), "activation": activation, "router_bias": True}


_FLOAT8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [FLOAT8_BLOCK, FLOAT8_BLOCK]}

_FAMILIES: dict[str, Callable[[Fields, int], _Family]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    **dict.fromkeys(["deepseek_v3", "kimi_k2", "glm4_moe"], _deepseek_v3),
    "gpt_oss": _gpt_oss,
}
"""By model_type, what the family says in its own way."""

_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu"}
_ACTIVATIONS |= dict.fromkeys(["gelu_pytorch_tanh", "gelu_new"], "geglu_tanh")
