"""Every fault can still be made: what it replaces stands once in its file, and the tests named with it are there."""

from tests.faults import FAULTS, ROOT


def test_faults_stand_in_their_files():
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1, fault
        assert all((ROOT / name).exists() for name in fault.tests.split()), fault
