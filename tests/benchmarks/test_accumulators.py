"""The simulated tensor core by hand, against the exact product, and as its bits grow fewer."""

import pytest
import torch

SHAPE, LENGTH = (12, 8), 1024


@pytest.fixture(scope="module")
def accumulators(benchmark_module):
    return benchmark_module("accumulators")


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def operands(one_sign=False, length=LENGTH):
    """Normal float64 matrices of bfloat16 values, whose products are exact in float32, too."""
    generator = torch.Generator().manual_seed(3)
    made = (torch.randn(rows, length, generator=generator) for rows in SHAPE)
    made = [x.bfloat16().double() for x in made]
    return [x.abs() for x in made] if one_sign else made


def rms(x):
    return x.square().mean().sqrt().item()


def test_a_chunk_is_aligned_cut_and_summed(accumulators):
    core = accumulators.TensorCore(addend_bits=4, accumulator_bits=4, chunk=2)
    # 1.75 + 1.125 = 2.875, of which four bits are 2.75. Beside it the last bit of an addend is
    # worth 0.25: of -0.3125 it leaves -0.25, and 2.75 + 1 - 0.25 = 3.5.
    a, ones = row(1.75, 1.125, 1.0, -0.3125), row(1.0, 1.0, 1.0, 1.0)
    assert accumulators.tensor_core(a, ones, core).item() == 3.5
    assert (a @ ones.T).item() == 3.5625


def test_a_product_is_aligned_by_the_exponents_of_its_operands(accumulators):
    core = accumulators.TensorCore(addend_bits=2, accumulator_bits=3)
    # 1.5 * 1.5 = 2.25 counts with exponent 0, so that 0.5 is the last bit, and 0.5 is kept.
    assert accumulators.tensor_core(row(1.5, 0.5), row(1.5, 1.0), core).item() == 2.5


def test_what_the_accumulator_held_is_an_addend(accumulators):
    core = accumulators.TensorCore(addend_bits=4, accumulator_bits=4)
    # Under 8, with its last bit of 1, 0.75 is lost, and 1.5 becomes 1.
    assert accumulators.tensor_core(row(0.75), row(1.0), core, start=8.0).item() == 8
    assert accumulators.tensor_core(row(1.5), row(1.0), core, start=8.0).item() == 9


def test_zeros_stay_zero(accumulators):
    core = accumulators.TensorCore(addend_bits=14, accumulator_bits=14)
    assert accumulators.tensor_core(row(0.0, 0.0), row(0.0, 3.0), core).item() == 0


@pytest.mark.parametrize("bits", [24, 30, 40])
@pytest.mark.parametrize("one_sign", [False, True])
def test_with_many_bits_it_is_the_product_but_for_rounding(accumulators, bits, one_sign):
    a, b = operands(one_sign)
    core = accumulators.TensorCore(addend_bits=bits, accumulator_bits=bits, chunk=32)
    products = a[:, None] * b[None]
    sums = products.unflatten(-1, (-1, core.chunk)).sum(dim=-1).cumsum(dim=-1)
    # An addend loses less than its chunk's last bit; each chunk has the accumulator twice.
    last_bit = 2.0 ** (1 - bits) * max(products.abs().max(), sums.abs().max()).item()
    addends = LENGTH + 2 * LENGTH / core.chunk
    wrong = accumulators.tensor_core(a, b, core) - a @ b.T
    assert wrong.abs().max().item() <= addends * last_bit


def test_30_bits_are_no_worse_than_a_gemm_in_float32(accumulators):
    a, b = operands()
    core = accumulators.TensorCore(addend_bits=30, accumulator_bits=30)
    wrong = accumulators.tensor_core(a, b, core) - a @ b.T
    assert rms(wrong) <= rms((a.float() @ b.float().T).double() - a @ b.T)


def test_whole_numbers_below_the_last_bit_are_exact(accumulators):
    a, b = (torch.round(4 * x) for x in operands())
    core = accumulators.TensorCore(addend_bits=24, accumulator_bits=24)
    assert accumulators.tensor_core(a, b, core).equal(a @ b.T)


@pytest.mark.parametrize("one_sign", [False, True])
def test_fewer_bits_never_reduce_the_error(accumulators, one_sign):
    a, b = operands(one_sign)
    cores = [accumulators.TensorCore(bits, bits) for bits in range(6, 28)]
    errors = [rms(accumulators.tensor_core(a, b, core) - a @ b.T) for core in cores]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1000 * errors[-1] > 0


def test_products_of_one_sign_are_lost_and_promotion_keeps_them(accumulators):
    a, b = operands(one_sign=True, length=4096)
    exact = a @ b.T

    def multiply(left, right):
        return accumulators.tensor_core(left, right, accumulators.HOPPER_FP8)

    alone, promoted = multiply(a, b), accumulators.in_blocks(a, b, 128, multiply).double()
    assert (alone < exact).all()
    assert rms(promoted - exact) < rms(alone - exact) / 10


def test_blocks_are_added_in_order_in_float32(accumulators):
    a, ones = row(2.0**24, 1.0, 1.0).float(), row(1.0, 1.0, 1.0).float()

    def multiply(left, right):
        return left @ right.T

    assert accumulators.in_blocks(a, ones, 1, multiply).item() == 2.0**24
    assert accumulators.in_blocks(a.flip(1), ones, 1, multiply).item() == 2.0**24 + 2


def test_scales_multiply_the_sums_of_their_blocks(accumulators):
    a, b = (torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[5.0, 6.0, 7.0, 8.0]]))
    scales = (torch.tensor([[2.0, 0.5]]), torch.tensor([[3.0, 10.0]]))

    def multiply(left, right):
        return left @ right.T

    result = accumulators.in_blocks(a, b, 2, multiply, scales)
    assert result.item() == (5 + 12) * 6 + (21 + 32) * 5
