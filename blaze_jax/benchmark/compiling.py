"""Several programs, compiled at the same time."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax


def compile_together[K](
    lowered: Mapping[K, jax.stages.Lowered], options: dict[str, Any] | None = None
) -> dict[K, jax.stages.Compiled]:
    """The programs under the same keys, with XLA's `options`; each has a thread of its own."""
    with ThreadPoolExecutor(len(lowered)) as threads:
        compiled = threads.map(lambda one: one.compile(options), lowered.values())
        return dict(zip(lowered, compiled, strict=True))
