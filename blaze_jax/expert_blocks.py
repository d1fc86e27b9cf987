"""The experts' parameters, a block of experts at a time, as they arrive from the devices that store them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jax import lax

from blaze_jax.exchange import Transport


class Journeys:
    """Arrays that travel one after the other, each while a kernel runs: XLA has one collective under way at a time.

    A journey is a function of the arrays that it waits for, and returns what arrives.
    """

    def __init__(self, waiting: list[Callable[[Any], Any]]):
        self._waiting, self._last, self._started = list(waiting), None, 0

    def add(self, waiting: list[Callable[[Any], Any]]) -> None:
        """Others, for later."""
        self._waiting += waiting

    def add_first(self, waiting: list[Callable[[Any], Any]]) -> None:
        """Others, before those that wait."""
        self._waiting = [*waiting, *self._waiting]

    def start(self, operands, after=()):
        """`operands` of the kernel under which the next array travels, once the one before is there.

        The next one leaves when `operands` and `after` are computed. The kernel must not write over `operands`.
        """
        if self._last is not None:
            operands, _ = lax.optimization_barrier((operands, self._last))
            self._last = None
        if self._waiting:
            self._last = self._waiting.pop(0)((operands, after))
            self._started += 1
        return operands

    def start_all(self, after, number: int | None = None) -> None:
        """All others leave when `after` is computed, or as many as make up `number`."""
        while self._waiting and (number is None or self._started < number):
            self._waiting.pop(0)(after)
            self._started += 1


class Blocks:
    """Some of the parameters by block: this device's are here, the others when their journeys have started."""

    def __init__(self, transport: Transport, own: list):
        self._blocks: list[list] = [own, *([] for _ in range(1, transport.blocks))]
        self.journeys = [
            partial(self._arrive, transport, array, block) for block in range(1, transport.blocks) for array in own
        ]

    def __getitem__(self, block: int) -> list:
        return self._blocks[block]

    def __iter__(self) -> Iterator[list]:
        return iter(self._blocks)

    def _arrive(self, transport: Transport, array, block: int, after):
        self._blocks[block].append(transport.block_arrives(array, block, after))
        return self._blocks[block][-1]
