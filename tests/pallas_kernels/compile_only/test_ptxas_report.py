"""Reading the assembler's report."""

import os

from pallas_kernels.compile_only.ptxas_report import KernelReport, captured_ptxas_report, parse_ptxas_report

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'moe_combine_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for moe_combine_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1 bytes smem
ptxas info    : Compile time = 32.403 ms

ptxas /tmp/t-1, line 192; info    : Potential out of bound access while accessing symbol 's' of type '.b8'.
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 16 bytes cumulative stack size, 1 bytes smem
"""
KERNELS = [KernelReport("moe_combine", 40, 0, 0, 0), KernelReport("other", 168, 16, 12, 8)]


def test_one_entry_per_kernel():
    assert parse_ptxas_report(REPORT) == KERNELS
    assert [k.spill_bytes for k in KERNELS] == [0, 20]
    assert parse_ptxas_report("nothing of the kind") == []


def test_captures_what_native_code_prints_and_nothing_after(capfd):
    print("before")
    with captured_ptxas_report() as kernels:
        os.write(1, REPORT.encode())
        assert kernels == []
    print("after")
    assert kernels == KERNELS
    assert capfd.readouterr().out == "before\nafter\n"
