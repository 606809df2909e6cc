"""The reading of a profiler's report."""

import pytest

from benchmarks.time_split import ALL, FREQUENCY, OTHER, part_of, split

REPORT = """
# Samples: 7K of event 'cpu-clock'
# Overhead       Samples  Shared Object          Symbol
    40.00%           997  [kernel.kallsyms]      [k] _copy_to_iter
    20.00%           498  libpython3.11.so.1.0   [.] _PyEval_EvalFrameDefault
    10.00%           250  libtorch_cpu.so        [.] at::native::(anonymous namespace)::fused_sgd_kernel
"""


def test_samples_are_milliseconds_of_a_step():
    found = split(REPORT, steps=10)
    assert found.parts["kernel: copies"] == pytest.approx(100.0)
    assert found.parts["Python"] == pytest.approx(498 / FREQUENCY * 100)
    assert found.of(ALL) == pytest.approx((997 + 498 + 250) / FREQUENCY * 100)


@pytest.mark.parametrize(
    ("library", "symbol", "part"),
    [
        ("[kernel.kallsyms]", "_copy_from_iter", "kernel: copies"),
        ("[kernel.kallsyms]", "handle_softirqs", "kernel: the rest of the network and the scheduler"),
        ("libtorch_cpu.so", "mkl_blas_avx512_xsdot", "check for values that are not finite"),
        ("libtorch_cpu.so", "VectorizedLoop2d<at::native::add_kernel(at::TensorIteratorBase&)>", "sums"),
        ("libtorch_cpu.so", "at::native::fused_adam_kernel", "update"),
        ("libtorch_python.so", "torch::FunctionSignature::parse", "calls into torch"),
        ("libpython3.11.so.1.0", "PyObject_GetAttr", "Python"),
        ("libc.so.6", "__memmove_avx512_unaligned_erms", OTHER),
    ],
)
def test_a_function_counts_for_one_part(library, symbol, part):
    assert part_of(library, symbol) == part
