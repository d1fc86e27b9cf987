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

from blaze_jax.activations import Activation, clamped_swiglu
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
    if isinstance(config, Mapping):
        where = "config"
    else:
        where = Path(config)
        where = where / "config.json" if where.is_dir() else where
        config = read_json(where)
    fields = _Fields(config, str(where))
    family = fields.choice("model_type", list(_FAMILIES))
    try:
        model = _model(family, fields, make_layer, **_FAMILIES[family](fields))
    except CheckpointError:
        raise
    except ValueError as error:  # of the layer's own checks
        raise CheckpointError(f"{where}: no layer of this library fits it: {error}") from error
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


class _Fields:
    """The fields of a `config.json`, which notes those that were asked for.

    Args:
      values: the file's content.
      where: the file, in errors.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self._where, self._known = values, where, set()

    def count(self, name: str, default: Any = _MISSING, *, least: int = 1, most: int = _LARGEST_COUNT) -> int:
        def holds(value):
            return _is_number(value, int) and least <= value <= most

        return self._get(name, default, holds, f"an integer from {least} to {most}")

    def count_of_any(self, names: list[str]) -> int:
        """Returns a number that has several names, of which releases of transformers write some or all."""
        present = [name for name in names if name in self._values] or names[:1]
        counts = [self.count(name) for name in present]
        if len(set(counts)) > 1:
            raise self.error(present[1], f"{present[0]}={counts[0]}")
        return counts[0]

    def counts(self, name: str, below: int) -> list[int]:
        """Returns numbers of layers; none where the field is null or missing."""

        def holds(value):
            return value is None or (isinstance(value, list) and all(type(v) is int and 0 <= v < below for v in value))

        return self._get(name, None, holds, f"a list of integers from 0 to {below - 1}") or []

    def number(self, name: str, default: Any = _MISSING) -> float:
        def holds(value):  # an integer may have hundreds of digits
            return _is_number(value, int | float) and abs(value) <= sys.float_info.max

        return float(self._get(name, default, holds, "a finite number"))

    def boolean(self, name: str, default: Any = _MISSING) -> bool:
        return self._get(name, default, lambda value: isinstance(value, bool), "true or false")

    def choice(self, name: str, allowed: list, default: Any = _MISSING) -> Any:
        def holds(value):
            return any(value == right and isinstance(value, bool) == isinstance(right, bool) for right in allowed)

        return self._get(name, default, holds, " or ".join(map(str, allowed)))

    def check_quantization(self, method: str, **details: Any) -> None:
        """Raises CheckpointError if the file tells of compression by another method, or in another way."""
        expected = {"quant_method": method} | details

        def holds(value):
            return value is None or (
                isinstance(value, Mapping) and all(value.get(name, right) == right for name, right in expected.items())
            )

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

    def error(self, name: str, rule: str) -> CheckpointError:
        if name not in self._values:
            return CheckpointError(f"{self._where}: {name} is missing, must be {rule}")
        return CheckpointError(f"{self._where}: {name}={shown(self._values[name])} must be {rule}")

    def _get(self, name: str, default: Any, holds: Callable[[Any], bool], rule: str) -> Any:
        """Returns the field's value, or the default; CheckpointError unless the rule holds for it."""
        self._known.add(name)
        value = self._values.get(name, default)
        if not holds(value):
            raise self.error(name, rule)
        return value


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _mixtral(fields: _Fields) -> dict[str, Any]:
    fields.choice("router_jitter_noise", [0], 0)
    fields.choice("norm_topk_prob", [True], True)
    return {"router": Router(normalize_weights=True), "expert_width": "intermediate_size"}


def _olmoe(fields: _Fields) -> dict[str, Any]:
    router = Router(normalize_weights=fields.boolean("norm_topk_prob"))
    return {"router": router, "expert_width": "intermediate_size"}


def _qwen3_moe(fields: _Fields) -> dict[str, Any]:
    fields.check_quantization("fp8", **_FLOAT8)
    router = Router(normalize_weights=fields.boolean("norm_topk_prob"))
    num_layers = fields.count("num_hidden_layers", most=_MOST_LAYERS)
    step = fields.count("decoder_sparse_step", 1)
    listed = set(fields.counts("mlp_only_layers", num_layers))
    return {
        "router": router,
        "expert_width": "moe_intermediate_size",
        "dense_layers": tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step),
        "dense_width": fields.count("intermediate_size"),
    }


def _deepseek_v3(fields: _Fields) -> dict[str, Any]:
    """Describes Kimi-K2 and GLM-4.5, too, which have its layer; what GLM-4.5 leaves out has one value there."""
    fields.choice("scoring_func", ["sigmoid"], "sigmoid")
    fields.choice("topk_method", ["noaux_tc"], "noaux_tc")
    fields.choice("moe_layer_freq", [1], 1)
    fields.check_quantization("fp8", **_FLOAT8)
    router = Router(
        scoring="sigmoid",
        normalize_weights=fields.boolean("norm_topk_prob"),
        weight_scale=fields.number("routed_scaling_factor"),
        num_groups=fields.count("n_group"),
        groups_per_token=fields.count("topk_group"),
    )
    num_layers = fields.count("num_hidden_layers", most=_MOST_LAYERS)
    return {
        "router": router,
        "expert_width": "moe_intermediate_size",
        "dense_layers": tuple(range(min(fields.count("first_k_dense_replace", least=0), num_layers))),
        "dense_width": fields.count("intermediate_size"),
        "shared_width": fields.count("n_shared_experts", least=0) * fields.count("moe_intermediate_size"),
        "selection_bias": True,
    }


def _gpt_oss(fields: _Fields) -> dict[str, Any]:
    fields.check_quantization("mxfp4")
    fields.choice("norm_topk_prob", [True], True)
    fields.choice("hidden_act", ["silu"])
    alpha, limit = fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)
    return {
        "router": Router(scoring="softmax_selected"),
        "expert_width": "intermediate_size",
        "activation": clamped_swiglu(alpha, limit),
        "router_bias": True,
    }


_FLOAT8 = {"fmt": "e4m3", "weight_block_size": [FLOAT8_BLOCK, FLOAT8_BLOCK]}

_FAMILIES: dict[str, Callable[[_Fields], dict[str, Any]]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}
"""By model_type, what the family says in its own way: arguments of `_model`, and of the layer."""

_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu"}
_ACTIVATIONS |= dict.fromkeys(["gelu_pytorch_tanh", "gelu_new"], "geglu_tanh")


def _model[Config](
    family: str,
    fields: _Fields,
    make_layer: Callable[..., Config],
    *,
    expert_width: str,
    activation: Activation | None = None,
    dense_layers: tuple[int, ...] = (),
    dense_width: int | None = None,
    router_bias: bool = False,
    **options: Any,
) -> PublicModel[Config]:
    """Returns the model, with what all families say in one way."""
    num_layers = fields.count("num_hidden_layers", most=_MOST_LAYERS)
    experts_per_token = fields.count_of_any(["num_experts_per_tok", "experts_per_token"])
    adds_losses = fields.boolean("output_router_logits", default=False)
    weight = fields.number("router_aux_loss_coef", 0.0) if adds_losses else 0.0
    layer = make_layer(
        num_experts=fields.count_of_any(["num_local_experts", "num_experts", "n_routed_experts"]),
        experts_per_token=experts_per_token,
        expert_width=fields.count(expert_width),
        activation=activation or _ACTIVATIONS[fields.choice("hidden_act", list(_ACTIVATIONS))],
        # transformers counts each of a token's choices as one, and all layers as one.
        load_balancing_weight=weight * experts_per_token / max(num_layers - len(dense_layers), 1),
        router_bias=router_bias,
        **options,
    )
    return PublicModel(
        family=family,
        width=fields.count("hidden_size"),
        num_layers=num_layers,
        dense_layers=dense_layers,
        dense_width=dense_width,
        use_bias=router_bias,
        layer=layer,
    )
