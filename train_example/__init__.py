"""A byte-level Mixture-of-Experts language model, trained with `blaze_jax`: `python -m train_example`."""

from importlib.util import find_spec

_NEEDED = ("matplotlib", "optax", "orbax", "safetensors", "tokenizers", "tqdm")

if missing := [name for name in _NEEDED if find_spec(name) is None]:
    raise ModuleNotFoundError(f"train_example needs {', '.join(missing)}: pip install 'blaze_jax[train]'")
