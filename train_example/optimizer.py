"""AdamW with warm-up, cosine decay and clipping."""

import jax
import optax

from train_example.config import TrainConfig

_WARMUP_SHARE = 0.05
_FINAL_SHARE = 0.1
_CLIP_NORM = 1.0


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up over the first 5 % of the schedule's steps, then a cosine down to a tenth of the peak."""
    steps = config.schedule_steps or config.steps
    warmup = max(1, round(_WARMUP_SHARE * steps))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / warmup,  # the first step already learns
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=_FINAL_SHARE * config.learning_rate,
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """The optimizer of a run."""
    adam = optax.adamw(
        learning_rate_schedule(config),
        b1=0.9,
        b2=0.95,
        mu_dtype=config.momentum_dtype,
        weight_decay=config.weight_decay,
        mask=matrices,
    )
    if config.trained == "experts":  # moments of the others would be most of the memory that this saves
        adam = optax.masked(adam, experts_only)
    return optax.chain(optax.clip_by_global_norm(_CLIP_NORM), adam)


def experts_only(params: optax.Params) -> optax.Params:
    """Marks the experts' matrices."""
    names = ("w_gate", "w_up", "w_down")
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in names, params)


def matrices(params: optax.Params) -> optax.Params:
    """Marks what weight decay applies to. Told by name: a stack of norm scales has two axes like a matrix."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)
