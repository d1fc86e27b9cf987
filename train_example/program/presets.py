"""The models to choose from: one for a laptop's CPU, the others for GPUs."""

from typing import Any

from blaze_jax import Router
from train_example.config import ModelConfig, TrainConfig
from train_example.public_models.gpt_oss import GptOssConfig, yarn, yarn_scale

_SIZES = ("width", "num_layers", "num_heads", "num_kv_heads", "num_experts", "experts_per_token", "expert_width")
_TRAINING = ("steps", "batch_size", "sequence_length", "learning_rate", "evaluate_every", "checkpoint_every")


def _preset(
    name: str, sizes: tuple[int, ...], training: tuple[float, ...], model: dict[str, Any] | None = None, **others: Any
) -> TrainConfig:
    """The preset of that name, of values in the order of `_SIZES` and `_TRAINING`, and fields of either by name."""
    of_model: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True)) | (model or {})
    of_run: dict[str, Any] = dict(zip(_TRAINING, training, strict=True)) | others
    make = GptOssConfig if "windows" in of_model else ModelConfig
    return TrainConfig(preset=name, model=make(**of_model), **of_run)


_QWEN3 = {"head_width": 128, "qk_norm": "head", "rotary_base": 1e6, "load_balancing_weight": 1e-3}

_PRESETS = (
    _preset("tiny", (128, 4, 4, 4, 16, 4, 64), (400, 16, 128, 3e-3, 40, 100)),
    _preset(
        "100m",
        (512, 8, 8, 8, 32, 4, 256),
        (20_000, 64, 1024, 1e-3, 500, 1000),
        {"num_dense_layers": 1, "dense_width": 1536},
        unroll=True,
    ),
    # Routed as in DeepSeek-V3: sigmoid scores, a shared expert, a selection bias for balance, a small auxiliary loss.
    _preset(
        "1b",
        (1024, 18, 16, 16, 64, 8, 256),
        (40_000, 64, 2048, 6e-4, 500, 1000),
        {
            "shared_width": 256,
            "router": Router(scoring="sigmoid"),
            "load_balancing_weight": 1e-4,
            "bias_update_rate": 1e-3,
        },
        accumulate=2,
        unroll=True,
    ),
    # The sizes of OLMoE (arXiv 2409.02060) except for grouped keys and values and one more layer. Parameters, their
    # 16-bit copy and its gradients, and Adam's moments take 112 GB of a GPU's 141.
    _preset(
        "7b-a1b",
        (2048, 17, 16, 4, 64, 8, 1024),
        (100_000, 8, 2048, 4e-4, 1000, 5000),
        {"z_loss_weight": 1e-3},
        unroll=True,
    ),
    # OLMoE itself, but for its vocabulary: of bytes.
    _preset(
        "olmoe",
        (2048, 16, 16, 16, 64, 8, 1024),
        (100_000, 8, 2048, 4e-4, 1000, 5000),
        {
            "qk_norm": "token",
            "norm_epsilon": 1e-5,
            "router": Router(normalize_weights=False),
            "z_loss_weight": 1e-3,
        },
        unroll=True,
    ),
    # Layers of Qwen3-30B-A3B (arXiv 2505.09388), 11 of 48, as many as one GPU of 141 GB trains in a loop; on bytes.
    _preset(
        "qwen3-30b-a3b-layers",
        (2048, 11, 32, 4, 128, 8, 768),
        (100_000, 4, 4096, 4e-4, 1000, 5000),
        _QWEN3,
        unroll=True,
    ),
    # All of it, with its vocabulary, of which bytes are the first 256. `--adapter` trains adapters of it alone.
    _preset(
        "qwen3-30b-a3b",
        (2048, 48, 32, 4, 128, 8, 768),
        (100_000, 8, 512, 1e-4, 1000, 5000),
        _QWEN3 | {"vocabulary": 151_936},
        optimizer="adam8",
    ),
    # gpt-oss-20b (arXiv 2508.10925), for `--adapter` and `--base mxfp4`.
    _preset(
        "gpt-oss-20b",
        (2880, 24, 64, 8, 32, 4, 2880),
        (100_000, 8, 512, 1e-4, 1000, 5000),
        {
            "head_width": 64,
            "rotary_base": 150_000.0,
            "rotary_frequencies": yarn(64, 150_000.0, 32.0, 4096, truncate=False),
            "rotary_scale": yarn_scale(32.0),
            "windows": (128, 0) * 12,
            "activation": "clamped_swiglu",
            "norm_epsilon": 1e-5,
            "router": Router(scoring="softmax_selected"),
            "load_balancing_weight": 1e-3,
            "vocabulary": 201_088,
        },
    ),
)
PRESETS = {preset.preset: preset for preset in _PRESETS}

OF_ADAPTERS: dict[str, Any] = {
    "learning_rate": 2e-4,
    "weight_decay": 0.0,
    "remat": "full",
    "save": "inputs",
    "unroll": False,
    "optimizer": "adam",
}
"""What `--adapter` changes of a preset, or of `FINE_TUNING`: the base is most of the memory, so little else is kept."""

FINE_TUNING = _preset("checkpoint", (128, 4, 4, 4, 16, 4, 64), (100, 4, 512, 1e-5, 20, 100), weight_decay=0.0)
"""The run that `--checkpoint` starts from; its model is another."""
