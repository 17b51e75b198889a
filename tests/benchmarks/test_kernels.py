"""The kernels, compiled for GPUs that are not here, against the committed table."""

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")

from megatron.quant.gpu import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(
    INTERPRETED or tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3),
    reason="the interpreter compiles nothing, and older versions take their source in another way",
)
ARCHITECTURES = ("sm_90", "sm_100")


@pytest.fixture(scope="module")
def kernels(benchmark_module):
    return benchmark_module("kernels")


def hold_to_the_table(kernels, cases, architecture):
    """Compile, and find nothing spilled, narrow or grown."""
    table = kernels.committed()
    for case in cases:
        code, row = case.compiled(architecture), table[case.name, architecture]
        assert code.spills == 0, case.name
        assert code.wide, case.name
        assert code.registers <= int(row["registers"]), case.name
        instructions = len(code.instructions) / case.elements
        assert instructions <= float(row["instructions"]) + 0.05, case.name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_are_within_the_table(kernels, architecture):
    hold_to_the_table(kernels, kernels.default_cases(), architecture)


@pytest.mark.heavy
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_are_within_the_table(kernels, architecture):
    hold_to_the_table(kernels, kernels.cases(), architecture)


def test_the_table_has_all_kernels(kernels):
    names = [case.name for case in kernels.cases()]
    assert set(kernels.committed()) == {(name, of) for name in names for of in ARCHITECTURES}
    assert {case.name for case in kernels.default_cases()} <= set(names)


def test_the_estimate_is_bound_by_instructions_or_by_loads_on_their_way(kernels):
    case = kernels.of_format("mxfp8", "rows")

    def share(instructions, registers, name="h200"):
        row = {"instructions": instructions, "registers": registers}
        return kernels.share(case, row, name)

    assert share(1, 32) == 1
    # 30.9e12 lanes a second are issued to, and 1.2e12 elements come in and go out.
    assert share(60, 32) == pytest.approx(30.9 / 60 / 1.2, rel=0.01)
    assert share(30, 32) == pytest.approx(2 * share(60, 32))
    # Eight warps of 32 threads with 32 elements each, on 132 multiprocessors, in 800 ns.
    few = 8 * 32 * 32 * 2 * 132 / 8e-7 / 2.4e12
    assert share(1, 255) == min(1, few)
    assert share(60, 32, "h100-80gb") > share(60, 32)
