"""A run as it is defined: the sizes of the model and how it is trained."""

from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, Literal

from blaze_jax import MoEConfig, Router

VOCABULARY = 256
"""How many values a byte has."""

AttentionKernel = Literal["cudnn", "xla"]
"""The kernel of the attention: cuDNN's flash attention, which keeps no scores, or plain XLA, which runs everywhere."""

QKNorm = Literal["head", "token"]
"""The numbers that a norm of queries and keys takes together: those of a head, or those of all heads of a token."""

ExpertsLayer = Literal["blaze_jax", "sort+tokamax", "sort+ragged_dot", "dense-twin"]
"""The layer that computes the experts: this library's; or a sort, a copy of the tokens in expert order, and grouped
products by tokamax or by jax.lax.ragged_dot. Or no experts: in their place a dense layer of as much arithmetic."""

Remat = Literal["none", "except-experts", "full"]
"""How much of a block the backward pass computes again: nothing; all but what the experts keep by their own `save`;
everything."""

Save = Literal["pre_activations", "int8", "inputs"]
Implementation = Literal["mosaic_gpu", "xla"]
Trained = Literal["all", "experts"]
Optimizer = Literal["adam", "adam8"]
DType = Literal["bfloat16", "float32"]
Base = Literal["bf16", "float8", "mxfp4", "nf4"]
"""What a part of a frozen base is kept in: bfloat16, or compressed, see `blaze_jax.QuantizedWeight`."""


class UserError(Exception):
    """Bad input. The message is one line that says what is wrong and what would be right."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the decoder.

    Attributes:
      width: d, the width of the residual stream.
      num_layers: blocks, the dense ones included.
      num_heads: attention heads.
      num_kv_heads: heads of keys and values, a divisor of `num_heads`.
      num_experts: E, in every block but the dense ones.
      experts_per_token: K.
      expert_width: n, hidden width of an expert.
      activation: gated activation of experts and dense layers: swiglu, geglu, geglu_tanh or reglu.
      shared_width: hidden width of the shared experts; 0 for none.
      num_dense_layers: this many first blocks have a dense feed-forward layer instead of experts.
      dense_layers: numbers of further blocks that have one, from 0.
      dense_width: hidden width of the dense layers.
      head_width: width of an attention head; None for `width / num_heads`.
      qk_norm: what an RMSNorm of queries and keys takes together: a head's numbers (Qwen3), or a token's (OLMoE).
      rotary_base: base of the rotary positions' frequencies.
      norm_epsilon: ε of every RMSNorm.
      tied_head: whether the embedding is the head, too.
      vocabulary: how many tokens there are; 256 for bytes.
      max_positions: the longest sequence that the model was made for; None where any will do.
      router: how experts are chosen and weighted.
      load_balancing_weight: weight of the load-balancing loss.
      z_loss_weight: weight of the router's z-loss.
      bias_update_rate: step of the selection bias (loss-free balancing); 0 for none.
    """

    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    activation: str = "swiglu"
    shared_width: int = 0
    num_dense_layers: int = 0
    dense_layers: tuple[int, ...] = ()
    dense_width: int = 0
    head_width: int | None = None
    qk_norm: QKNorm | None = None
    rotary_base: float = 10_000.0
    norm_epsilon: float = 1e-6
    tied_head: bool = False
    vocabulary: int = VOCABULARY
    max_positions: int | None = None
    router: Router = field(default_factory=Router)
    load_balancing_weight: float = 0.01
    z_loss_weight: float = 0.0
    bias_update_rate: float = 0.0

    def stacks(self) -> dict[str, list[int]]:
        """The blocks in runs of one kind, which is told by how a run's name starts: "dense_blocks" or "moe_blocks"."""
        dense = {*range(self.num_dense_layers), *self.dense_layers}
        stacks: dict[str, list[int]] = {}
        for is_dense, layers in groupby(range(self.num_layers), dense.__contains__):
            kind = "dense_blocks" if is_dense else "moe_blocks"
            before = sum(name.startswith(kind) for name in stacks)
            stacks[f"{kind}_{before}" if before else kind] = list(layers)
        return stacks

    def moe(self, **options: Any) -> MoEConfig:
        """The Mixture-of-Experts layer of a block, with `options` of `MoEConfig` that are not the model's."""
        own = {field.name: getattr(self, field.name) for field in fields(MoEConfig) if hasattr(self, field.name)}
        return MoEConfig(**own, **options)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. All but `data` and `checkpoint_every` decide what comes out of it.

    The command line has an option for each field but `model`, with its line here as the help.

    Attributes:
      preset: name the run started from.
      model: sizes of the model.
      data: a file or folder of text, of any size; left out, half a megabyte that comes with Python.
      steps: optimizer steps of the whole run, which a resumed run may change.
      schedule_steps: steps over which the learning rate rises and falls, after which it stays; left out, all.
      batch_size: sequences per step.
      sequence_length: bytes, or a public model's tokens, per sequence.
      accumulate: a step computes its batch in this many parts, one after the other, for less memory.
      learning_rate: peak of the schedule, after the warm-up.
      weight_decay: decay of the matrices.
      seed: seeds the initial parameters, the batches and the sample.
      dtype: type of the computation; parameters are float32, or with adam8 of this type.
      optimizer: adam; or adam8, whose moments take 8 bits, and which updates each block as soon as its gradients exist,
        for models that fill a GPU, and adapters all at once.
      momentum_dtype: type of the gradients' running mean in the optimizer; all else of its state is float32.
      remat: what the backward pass computes again, for less memory: nothing; all but what the experts keep by `save`;
        or everything.
      save: what the experts keep for their backward pass, see `blaze_jax.expert_ffn`.
      precision: fp8 for experts that multiply 8 bits, see `blaze_jax.expert_ffn`; left out, they multiply `dtype`.
      implementation: the kernels that compute the experts; left out, the best that can run here.
      experts_layer: what computes the experts: blaze_jax, or a conventional layer to compare it with; or dense-twin, a
        dense layer of the arithmetic that a token's experts take, in their place.
      attention: what computes the attention; left out, the best that can run here.
      equal_bits: whether two runs on a GPU have the same bits, for which attention adds up gradients in one order.
      unroll: whether the program has every block by itself, instead of a loop over one.
      checkpoint: folder of a public model, OLMoE, Qwen3-MoE or gpt-oss, to fine-tune; left out, a fresh one.
      trained: what part of the model is trained: all of it, or the experts' matrices.
      adapter: trains adapters alone, such as rank=16, or rank=16,alpha=32,targets=gate+up+q+v,shared, where the experts
        share A and two projections of the attention have adapters, too; left out, the model itself.
      adapter_from: folder of adapters of a public model in PEFT's format to begin with, which say what they are.
      base: what the frozen weights of experts beside adapters are kept in, decoded where they are used.
      base_attention: what those of the attention's projections are kept in.
      embedding: where the frozen embedding stays beside adapters: on the device, or on the host, from which each step
        fetches the rows of its tokens.
      merge: whether a public model is saved with its adapters in it, and not only they by themselves.
      evaluate_every: steps between evaluations on the held-out text.
      checkpoint_every: steps between checkpoints.
    """

    preset: str = ""
    model: ModelConfig
    data: str | None = None
    steps: int
    schedule_steps: int | None = None
    batch_size: int
    sequence_length: int
    accumulate: int = 1
    learning_rate: float
    weight_decay: float = 0.1
    seed: int = 0
    dtype: DType = "bfloat16"
    optimizer: Optimizer = "adam"
    momentum_dtype: DType = "float32"
    remat: Remat = "none"
    save: Save = "pre_activations"
    precision: Literal["fp8"] | None = None
    implementation: Implementation | None = None
    experts_layer: ExpertsLayer = "blaze_jax"
    attention: AttentionKernel | None = None
    equal_bits: bool = True
    unroll: bool = False
    checkpoint: str | None = None
    trained: Trained = "all"
    adapter: str | None = None
    adapter_from: str | None = None
    base: Base = "bf16"
    base_attention: Base = "bf16"
    embedding: Literal["device", "host"] = "device"
    merge: bool = False
    evaluate_every: int
    checkpoint_every: int
