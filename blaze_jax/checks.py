"""Checks of arguments that several modules share, and warnings that are given once."""

import reprlib
import warnings
from collections.abc import Mapping
from functools import lru_cache
from numbers import Integral, Real

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array


def check_integers(**arguments: object) -> None:
    """Raises ValueError naming the first argument that is not an integer of Python or numpy.

    A float that happens to be whole is none either: 1.5 in its place would pass every comparison, and cut silently.
    """
    _check(arguments, lambda value: _is_number(value, Integral), "an integer")


def check_numbers(**arguments: object) -> None:
    """Raises ValueError naming the first argument that is not a number of Python or numpy."""
    _check(arguments, lambda value: _is_number(value, Real), "a number")


def check_booleans(**arguments: object) -> None:
    """Raises ValueError naming the first argument that is not True or False."""
    _check(arguments, lambda value: isinstance(value, bool), "True or False")


def check_dtypes(**arguments: DTypeLike | None) -> None:
    """Raises ValueError naming the first argument that is no floating dtype; None passes."""
    _check(arguments, _is_floating, "a floating dtype or its name, such as jnp.bfloat16 or 'bfloat16'")


def check_fields(fields: object, rules: Mapping[str, tuple[bool, str]]) -> None:
    """Raises ValueError naming the first attribute whose rule does not hold, its value and the rule."""
    for name, (holds, rule) in rules.items():
        if not holds:
            raise ValueError(f"{name}={getattr(fields, name)!r} must be {rule}")


def as_array(name: str, value: object) -> Array:
    """`value` as an array of jax, the same object if it is one; ValueError naming the argument if it cannot be."""
    if isinstance(value, jax.Array):
        return value
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={shown(value)} must be an array") from error


def shown(value: object) -> str:
    """`repr(value)` on one line, shortened."""
    return " ".join(reprlib.repr(value).split())


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_floating(value: DTypeLike | None) -> bool:
    try:
        return value is None or jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        return False


def _check(arguments: dict, holds, rule: str) -> None:
    for name, value in arguments.items():
        if not holds(value):
            raise ValueError(f"{name}={value!r} must be {rule}")


@lru_cache(4096)  # a message may hold sizes, of which a long run can have any number
def warn_once(message: str) -> None:
    """Warns of `message`, the first time that it is given in this process."""
    warnings.warn(message, stacklevel=2)
