"""Fields of a `config.json`, each taken with its type checked; unknown ones that could matter are errors."""

import math
import re
from collections.abc import Mapping
from typing import Any

from blaze_jax.checkpoints.errors import CheckpointError
from blaze_jax.checks import shown

_MISSING = object()

LARGEST_COUNT = 2**31 - 1
MOST_LAYERS = 10_000
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
      where: what an error calls it.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self._where, self._known = values, where, set()

    def count(self, name: str, default: Any = _MISSING, *, least: int = 1, most: int = LARGEST_COUNT) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(name, f"an integer of at least {least}")
        if value > most:
            raise self.error(name, f"an integer of at most {most}")
        return value

    def count_of_any(self, names: list[str]) -> int:
        """A number that has several names, of which releases of transformers write one or another, or several."""
        present = [name for name in names if name in self._values] or names[:1]
        counts = [self.count(name) for name in present]
        if len(set(counts)) > 1:
            raise self.error(present[1], f"{present[0]}={counts[0]}")
        return counts[0]

    def counts(self, name: str, below: int) -> list[int]:
        """Distinct numbers of layers; none where the field is null or missing."""
        value = self._get(name, None)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(type(v) is int and 0 <= v < below for v in value):
            raise self.error(name, f"a list of integers from 0 to {below - 1}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        value = self._get(name, default)
        try:
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                return float(value)
        except OverflowError:  # an integer of hundreds of digits
            pass
        raise self.error(name, "a finite number")

    def boolean(self, name: str, default: Any = _MISSING) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, allowed: list, default: Any = _MISSING) -> Any:
        value = self._get(name, default)
        if not any(value == right and isinstance(value, bool) == isinstance(right, bool) for right in allowed):
            raise self.error(name, " or ".join(map(str, allowed)))
        return value

    def check_quantization(self, method: str, **details: Any) -> None:
        """Raises CheckpointError if the file tells of compression by another method, or in another way."""
        value = self._get("quantization_config", None)
        if value is None:
            return
        expected = {"quant_method": method} | details
        if not isinstance(value, Mapping) or any(value.get(name, right) != right for name, right in expected.items()):
            raise self.error("quantization_config", f"null, or have {expected}")

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

    def _get(self, name: str, default: Any) -> Any:
        self._known.add(name)
        return self._values.get(name, default)
