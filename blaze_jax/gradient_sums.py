"""Running sums that the experts' backward pass adds its weight gradients to, in place, instead of returning them.

Several microbatches, or the layers of a loop, then need no second array of gradients and no pass that adds. A sum flows
backward, as the gradient of an array that flows forward through the layer and is never read: what comes in as the
gradient of that array behind the layer goes out as its gradient before the layer, with the weights' added. Through a
loop over layers it is a stack of all layers' sums, of which each adds to its own.

An array that a layer takes and returns would cut through every function from the module to the experts, most of which
have no use for it. So the module leaves it where the experts find it, and looks whether they did.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Int

from blaze_jax.plan import Parameters


class GradientSums(NamedTuple):
    """Sums of gradients, or what flows forward in their place.

    Attributes:
      arrays: `(S, d, n)`, of the down projection `(S, n, d)`, without biases; None for no sums.
      first: int32, the place of the first expert; None for 0.
    """

    arrays: Parameters | None
    first: Int[Array, ""] | None


NO_SUMS = GradientSums(None, None)


class Offered:
    """Arrays for the one layer that is called while they are on offer.

    Attributes:
      arrays: by the names of the weights, `(layers, E, d, n)`; once the layer has run, what it returned.
      layer: int32, the number of the layer.
      taken: whether it did.
    """

    def __init__(self, arrays: Mapping[str, Array], layer: Int[Array, ""]):
        self.arrays, self.layer, self.taken = dict(arrays), layer, False

    def give_back(self, arrays: Parameters) -> None:
        """What the layer made of the arrays flows on."""
        ups = zip([name for name in ("w_gate", "w_up") if name in self.arrays], arrays.ups, strict=True)
        self.arrays = {name: up.weight for name, up in ups} | {"w_down": arrays.down.weight}
        self.taken = True


_offered: ContextVar[Offered | None] = ContextVar("gradient_sums", default=None)


@contextmanager
def gradient_sums_on_offer(arrays: Mapping[str, Array], layer: Int[Array, ""]) -> Iterator[Offered]:
    """The block calls one layer, whose experts take the arrays, and give back what flows on.

    Raises:
      NotImplementedError: none did, and the gradients would be lost: the experts are over devices, or are others.
    """
    offered = Offered(arrays, layer)
    token = _offered.set(offered)
    try:
        yield offered
    finally:
        _offered.reset(token)
    if not offered.taken:
        raise NotImplementedError(
            "gradient_sums are for blaze_jax's own experts on one device: add the gradients of others up outside"
        )


def sums_on_offer() -> Offered | None:
    """The arrays on offer that no layer has taken; None where a program is traced for several devices."""
    offered = _offered.get()
    if offered is None or offered.taken or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    return offered


@custom_vmap
def one_example[T](arrays: T) -> T:
    """The arrays, which must not be batched: examples would each add to sums that they share."""
    return arrays


@one_example.def_vmap
def _refuse(axis_size, in_batched, arrays):
    raise NotImplementedError("gradient_sums are not for jax.vmap, whose examples would each add to the same sums")
