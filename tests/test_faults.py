"""Every fault can still be made: what it replaces stands once in its function, and the tests named with it exist."""

import pytest

from tests.faults import FAULTS, definitions, files, place


@pytest.mark.slow
def test_faults_stand_in_their_functions():
    among = definitions()
    for fault in FAULTS:
        place(fault, among)
        assert all(map(files, fault.tests.split())), fault
