"""A Mixture-of-Experts language model, trained with `blaze_jax`: `python -m train_example`.

The files of this folder are what one reads, and copies, to build a model of one's own; they need `import blaze_jax`,
jax, flax and optax. In the order of reading:

- `config`: the sizes of the model, and how it is trained.
- `layers` and `model`: norms, rotary attention, and the decoder whose blocks hold `blaze_jax.MoE`.
- `data`: a text as batches, and its held-out part.
- `step` and `compile_step`: optimizer, training step and evaluation, and what XLA is told for speed and equal bits.
- `loop`: the steps of a run, as an iterator.

`generate` has a cache of keys and values, and generates and scores with it. `program` adds what the command line
offers: presets, meshes and clusters, checkpoints, figures. `public_models` has OLMoE, Qwen3-MoE and gpt-oss.
"""

from importlib.util import find_spec

_NEEDED = ("matplotlib", "optax", "orbax", "tokenizers", "tqdm")

if missing := [name for name in _NEEDED if find_spec(name) is None]:
    raise ModuleNotFoundError(f"train_example needs {', '.join(missing)}: pip install 'blaze_jax[train]'")
