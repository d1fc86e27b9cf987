"""The kernels for every GPU since Ampere take the place of the families in this folder."""

import pytest

from pallas_kernels import ampere
from tests.pallas_kernels.conftest import AMPERE


@pytest.fixture(params=[AMPERE])
def kernels():
    """They run in the interpreter, where a race is an error."""
    with ampere.interpreted():
        yield ampere
