"""The models to choose from: one for a laptop's CPU, three for GPUs."""

from dataclasses import replace

from blaze_jax import Router
from train_example.config import ModelConfig, TrainConfig

_TINY = TrainConfig(
    preset="tiny",
    model=ModelConfig(
        width=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        num_experts=16,
        experts_per_token=4,
        expert_width=64,
    ),
    steps=400,
    batch_size=16,
    sequence_length=128,
    learning_rate=3e-3,
    evaluate_every=40,
    checkpoint_every=100,
)

_100M = TrainConfig(
    preset="100m",
    model=ModelConfig(
        width=512,
        num_layers=8,
        num_heads=8,
        num_kv_heads=8,
        num_experts=32,
        experts_per_token=4,
        expert_width=256,
        num_dense_layers=1,
        dense_width=1536,
    ),
    steps=20_000,
    batch_size=64,
    sequence_length=1024,
    unroll=True,
    learning_rate=1e-3,
    evaluate_every=500,
    checkpoint_every=1000,
)

# Routed as in DeepSeek-V3: sigmoid scores, a shared expert, a selection bias for balance and a small auxiliary loss.
_1B = TrainConfig(
    preset="1b",
    model=ModelConfig(
        width=1024,
        num_layers=18,
        num_heads=16,
        num_kv_heads=16,
        num_experts=64,
        experts_per_token=8,
        expert_width=256,
        shared_width=256,
        router=Router(scoring="sigmoid"),
        load_balancing_weight=1e-4,
        bias_update_rate=1e-3,
    ),
    steps=40_000,
    batch_size=64,
    sequence_length=2048,
    accumulate=2,
    learning_rate=6e-4,
    evaluate_every=500,
    checkpoint_every=1000,
)

# The sizes of OLMoE (arXiv 2409.02060) except for grouped keys and values and one more layer. Parameters, their 16-bit
# copy and its gradients, and Adam's moments take 112 GB, and a step of this batch 132 GB: one GPU of 141 GB.
_7B_A1B = TrainConfig(
    preset="7b-a1b",
    model=ModelConfig(
        width=2048,
        num_layers=17,
        num_heads=16,
        num_kv_heads=4,
        num_experts=64,
        experts_per_token=8,
        expert_width=1024,
        z_loss_weight=1e-3,
    ),
    steps=100_000,
    batch_size=8,
    sequence_length=2048,
    learning_rate=4e-4,
    evaluate_every=1000,
    checkpoint_every=5000,
)

FINE_TUNING = replace(
    _TINY,
    preset="checkpoint",
    steps=100,
    batch_size=4,
    sequence_length=512,
    learning_rate=1e-5,
    weight_decay=0.0,
    evaluate_every=20,
    checkpoint_every=100,
)
"""The run that `--checkpoint` starts from; its model is another."""

PRESETS = {preset.preset: preset for preset in (_TINY, _100M, _1B, _7B_A1B)}
