"""Checks of arguments that several modules share."""

from numbers import Integral


def check_integers(**arguments: object) -> None:
    """Raises ValueError naming the first argument that is not an integer of Python or numpy.

    A float that happens to be whole is none either: 1.5 in its place would pass every comparison, and cut silently.
    """
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{name}={value!r} must be an integer")
