"""The kernels, compiled for GPUs that are not here, against the committed table."""

import csv

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")

from mqo.quant.gpu import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(
    INTERPRETED or tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3),
    reason="the interpreter compiles nothing, and older versions take their source in another way",
)
ARCHITECTURES = ("sm_90", "sm_100")


@pytest.fixture(scope="module")
def kernels(benchmark_module):
    return benchmark_module("kernels")


@pytest.fixture(scope="module")
def table(kernels):
    """The committed rows by kernel and architecture."""
    with kernels.TABLE.open(encoding="utf-8", newline="") as file:
        return {(row["kernel"], row["architecture"]): row for row in csv.DictReader(file)}


def of_each_kind(kernels):
    """{architecture: kernels}, where each kind is on one of them: compiling all takes minutes."""
    rows, columns = (
        [kernels.of_format(kind, axis) for kind in kernels.MAIN] for axis in kernels.AXES
    )
    stochastic = kernels.of_format("mxfp8", "rows", rounding="stochastic")
    made = ([*rows, stochastic], [*columns, kernels.of_hadamard(16, "columns")])
    return dict(zip(ARCHITECTURES, made, strict=True))


def hold_to_the_table(table, cases, architecture):
    """Compile, and find nothing spilled, narrow or grown."""
    for case in cases:
        code, row = case.compiled(architecture), table[case.name, architecture]
        assert code.spills == 0, case.name
        assert code.wide, case.name
        assert code.registers <= int(row["registers"]), case.name
        instructions = len(code.instructions) / case.elements
        assert instructions <= float(row["instructions"]) + 0.05, case.name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_are_within_the_table(kernels, table, architecture):
    hold_to_the_table(table, of_each_kind(kernels)[architecture], architecture)


@pytest.mark.heavy
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_are_within_the_table(kernels, table, architecture):
    hold_to_the_table(table, kernels.cases(), architecture)


def test_the_table_has_all_kernels(kernels, table):
    names = [case.name for case in kernels.cases()]
    assert set(table) == {(name, of) for name in names for of in ARCHITECTURES}
    some = [case.name for cases in of_each_kind(kernels).values() for case in cases]
    assert len(some) == 8 and {*some} <= {*names}


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
