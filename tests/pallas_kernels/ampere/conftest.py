"""The kernels for every GPU since Ampere take the place of the families in the tests that this folder imports."""

import pytest

from pallas_kernels import ampere
from pallas_kernels.simt.language import interpreted
from tests.pallas_kernels.conftest import AMPERE


@pytest.fixture(params=[AMPERE])
def kernels():
    """In the interpreter, where a race is an error."""
    with interpreted():
        yield ampere
