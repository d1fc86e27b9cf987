"""The kernels for every GPU since Ampere take the place of the families in the tests that this folder imports."""

import pytest

from pallas_kernels import ampere
from pallas_kernels.simt import interpreted
from tests.pallas_kernels.conftest import AMPERE


@pytest.fixture(params=[AMPERE])
def kernels(detect_races):
    """In the interpreter, where a race is an error, also in tests without race detection: that is for Pallas's."""
    del detect_races
    with interpreted():
        yield ampere
