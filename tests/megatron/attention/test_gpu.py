"""The Triton kernels against chunked attention, with the same codes.

On a CUDA device the tests run there; without one, in Triton's interpreter, on CPU tensors. That has
to be chosen before triton is imported, so a test here starts a process that runs this file again.
"""

import math

import pytest
import torch
from megatron.attention import Scores, Span, Visible, chunked_attention
from megatron.quant import FORMATS, RECORDER, OperandParts, QuantSpec
from megatron.quant.formats import NONE

triton = pytest.importorskip("triton", reason="triton is not installed")

from megatron.attention.gpu import backward, forward, kernel_attention, supports  # noqa: E402
from megatron.attention.gpu.launch import H100_BYTES, Work  # noqa: E402
from megatron.quant.gpu import INTERPRETED  # noqa: E402

from ..quant.triton_runs import ahead, run_in_the_interpreter  # noqa: E402
from .conftest import largest  # noqa: E402
from .test_chunked import error, gradients  # noqa: E402

ON_CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_CUDA else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCORES = Scores(0.25, None, torch.float32)
# No multiple of a tile, which has 16 to 64 queries, and 32 keys or more.
LENGTH = 70
SHAPES = {
    "plain": {"heads": 2, "groups": 2},
    "grouped": {"heads": 2, "groups": 1},
    "MLA's heads": {"heads": 2, "groups": 2, "width": 24, "value_width": 16},
    "odd sizes": {"heads": 3, "groups": 1, "width": 12, "value_width": 7},
}
# Of float32, sums of some terms in another order, and on a device an exp that is off by some units
# in the last place. Of half precision, a unit in the last place: a sum in another order may round
# another way, and chunks round what each head gives a key that it shares.
WIDE = 5e-6 if ON_CUDA else 1e-6
TOLERANCES = {torch.float32: WIDE, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# Codes that may be others, where a probability's last bit moves it over a rounding tie; values
# that differ by less than a code have another scale, of the last bit of an amax.
MOVED = 1e-4
LESS_THAN_A_CODE = 0.005
# A format of each kind of scale: what a kernel is specialized by.
SCALES = tuple({FORMATS[kind].scale: kind for kind in FORMATS}.values())
SEED = 2**64 - 7

runs_kernels = pytest.mark.skipif(
    not (ON_CUDA or INTERPRETED),
    reason="no CUDA device: these run in the process that the interpreter's test starts",
)
in_the_parent = pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
needs_cuda = pytest.mark.skipif(not ON_CUDA, reason="no CUDA device")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@in_the_parent
def test_this_file_in_the_interpreter():
    assert run_in_the_interpreter(__file__, "not heavy") > 20


@in_the_parent
@pytest.mark.heavy
def test_this_file_in_the_interpreter_exhaustively():
    assert run_in_the_interpreter(__file__, "heavy") > 0


@pytest.fixture
def made(operands):
    """A function that makes query, key and value on the device."""

    def make(length=LENGTH, **shape):
        shape = SHAPES["plain"] | shape
        return [t.detach().to(DEVICE).requires_grad_() for t in operands(length, length, **shape)]

    return make


def parts_of(spec, query, seed=None):
    length, batch, heads, _ = query.shape
    amax = torch.ones((), device=query.device) if spec.needs_tensor_amax else None
    place = ("pv", "unlabeled", "probs")
    return OperandParts(place, spec, (batch * heads, length, length), seed, amax)


def chunked(query, key, value, probs, scores=SCORES):
    visible = Visible((Span(0, query.size(0), 0),))
    return chunked_attention(query, key, value, scores=scores, visible=visible, probs=probs)


def identity(key):
    """Values by which the context is the probabilities."""
    one = torch.eye(key.size(0), dtype=key.dtype, device=key.device)
    return one[:, None, None].expand(*key.shape[:3], -1)


def as_probs(context, query):
    """View a context of these values as [b * np, sq, sk]."""
    return context.unflatten(2, (query.size(2), -1)).permute(1, 2, 0, 3).flatten(0, 1)


class Given(OperandParts):
    """Gives codes that are known in the place of its own."""

    def quantize(self, part, matrix, row, out):
        count, rows, size = part.shape
        return out.copy_(CODES[0][matrix : matrix + count, row : row + rows, :size])


CODES = []


def moved(codes, expected):
    """How many codes are others."""
    away = (codes.double() - expected.double()).abs()
    return (away > LESS_THAN_A_CODE * expected.double().abs()).sum().item()


def assert_as_chunked(tensors, spec, seed=None, scores=SCORES):
    """The codes, and with the same ones the context and the gradients."""
    query, key, _ = tensors
    parts, dtype = parts_of(spec, query, seed), query.dtype
    with torch.no_grad():
        codes, expected = (
            as_probs(attend(query, key, identity(key)), query)
            for attend in (
                lambda *heads: kernel_attention(*heads, scores=scores, probs=parts),
                lambda *heads: chunked(*heads, parts, scores),
            )
        )
    if spec.quant_type == NONE:
        assert error(codes, expected) < TOLERANCES[dtype]
    else:
        count = codes.size(0) * query.size(0) * (query.size(0) + 1) // 2
        assert moved(codes, expected) <= math.ceil(MOVED * count)
    CODES[:] = [codes]
    given = Given(parts.place, parts.spec, parts.shape, seed, parts.amax)
    expected = chunked(*tensors, given, scores)
    found = kernel_attention(*tensors, scores=scores, probs=parts)
    assert found.dtype == dtype
    assert error(found, expected) < TOLERANCES[dtype]
    pairs = zip(*(gradients(c.cpu(), tensors) for c in (found, expected)), strict=True)
    for one, other in pairs:
        assert one.dtype == dtype
        assert error(one, other) < TOLERANCES[dtype]


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@every_shape
def test_context_and_gradients_without_a_format(made, shape, dtype):
    assert_as_chunked(made(dtype=dtype, **shape), QuantSpec(NONE))


@runs_kernels
@pytest.mark.parametrize("quant_type", SCALES)
def test_every_scale(made, quant_type):
    assert_as_chunked(made(dtype=torch.bfloat16, **SHAPES["grouped"]), QuantSpec(quant_type))


@runs_kernels
@pytest.mark.parametrize("quant_type", ["mxfp8", "nvfp4", "fp8_block_fp32"])
def test_float32(made, quant_type):
    assert_as_chunked(made(), QuantSpec(quant_type))


@runs_kernels
@pytest.mark.parametrize("quant_type", ["mxfp4"])
def test_float16(made, quant_type):
    assert_as_chunked(made(dtype=torch.float16), QuantSpec(quant_type))


@runs_kernels
@pytest.mark.heavy
@every_dtype
@pytest.mark.parametrize("quant_type", FORMATS)
@every_shape
def test_every_format(made, shape, quant_type, dtype):
    assert_as_chunked(made(dtype=dtype, **shape), QuantSpec(quant_type))


@runs_kernels
@pytest.mark.parametrize("quant_type", ["mxfp4", "nvfp4", "hifp8"])
def test_stochastic_rounding_draws_by_the_elements_place(made, quant_type):
    tensors = made(dtype=torch.bfloat16, **SHAPES["grouped"])
    assert_as_chunked(tensors, QuantSpec(quant_type, rounding="stochastic"), SEED)


@runs_kernels
@pytest.mark.parametrize(("block", "length"), [(16, 2), (32, 64), (64, 65), (128, 130)])
def test_blocks_of_any_size_in_sequences_of_any_length(made, block, length):
    tensors = made(length, width=16, dtype=torch.bfloat16)
    assert_as_chunked(tensors, QuantSpec("mxfp4", block=block, scale_rule="even"))


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_softmax_may_scale_again(made, dtype):
    scores = Scores(0.25, 3.0, torch.float32)
    assert_as_chunked(made(dtype=dtype), QuantSpec("mxfp8"), scores=scores)


@runs_kernels
@pytest.mark.parametrize("quant_type", ["mxfp8", "nvfp4", "fp8_tensor_e4m3", "hifp8"])
def test_a_nan_does_not_vanish(made, quant_type):
    query, key, value = (t.detach() for t in made())
    query[50] = torch.nan
    probs = parts_of(QuantSpec(quant_type), query)
    found = kernel_attention(query, key, value, scores=SCORES, probs=probs)
    assert found[50].isnan().all()
    assert found[:50].isfinite().all()


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_softmax_may_be_in_half_precision(made, dtype):
    assert_as_chunked(made(dtype=dtype), QuantSpec("mxfp8"), scores=Scores(0.25))


@runs_kernels
@pytest.mark.parametrize("quant_type", ["mxfp8", "nvfp4"])
def test_backward_has_the_codes_of_forward(made, quant_type):
    """Gradients that are 1 at the diagonal make that of the values the codes."""
    query, key, _ = made(dtype=torch.bfloat16)
    value = identity(key).clone().requires_grad_()
    probs = parts_of(QuantSpec(quant_type), query)
    context = kernel_attention(query, key, value, scores=SCORES, probs=probs)
    codes = as_probs(context.detach(), query)
    grad = identity(query).flatten(2)
    (found,) = torch.autograd.grad(context, value, grad)
    others = moved(found.permute(1, 2, 3, 0).flatten(0, 1), codes)
    assert others <= (0 if INTERPRETED else MOVED * codes.numel() / 2)
    assert codes.any()


@runs_kernels
def test_operands_of_any_strides(made):
    tensors = made(dtype=torch.bfloat16, **SHAPES["grouped"])
    probs = parts_of(QuantSpec("mxfp8"), tensors[0])
    dense = kernel_attention(*tensors, scores=SCORES, probs=probs)
    right = gradients(dense.cpu(), tensors)
    # Batch first; a part of a wider tensor; a head dim that is not dense.
    views = [
        tensors[0].detach().transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([tensors[1].detach(), tensors[2].detach()], -1)[..., :16],
        tensors[2].detach().transpose(2, 3).contiguous().transpose(2, 3),
    ]
    views = [t.requires_grad_() for t in views]
    found = kernel_attention(*views, scores=SCORES, probs=probs)
    assert torch.equal(found, dense)
    assert all(map(torch.equal, gradients(found.cpu(), views), right))


@runs_kernels
def test_gradients_of_any_strides(made):
    tensors = made(dtype=torch.bfloat16)
    probs = parts_of(QuantSpec("mxfp8"), tensors[0])
    context = kernel_attention(*tensors, scores=SCORES, probs=probs)
    grad = torch.randn_like(context)
    right = torch.autograd.grad(context, tensors, grad, retain_graph=True)
    strided = grad.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert all(map(torch.equal, torch.autograd.grad(context, tensors, strided), right))


@runs_kernels
@pytest.mark.parametrize("quant_type", ["mxfp8", "hifp8"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_nan_goes_where_it_goes_in_chunks(made, quant_type):
    query, key, value = (t.detach() for t in made())
    query[50, 1] = key[30, 0, 1] = torch.nan
    probs = parts_of(QuantSpec(quant_type), query)
    found = kernel_attention(query, key, value, scores=SCORES, probs=probs)
    expected = chunked(query, key, value, probs)
    assert torch.equal(found.isnan(), expected.isnan())
    assert error(found.nan_to_num(), expected.nan_to_num()) < WIDE


@runs_kernels
def test_calls_are_counted_as_in_chunks(made):
    tensors = made(20)
    for quant_type in (NONE, "mxfp8"):
        seen = []
        for attend in (kernel_attention, None):
            RECORDER.reset()
            probs = parts_of(QuantSpec(quant_type), tensors[0])
            if attend:
                attend(*tensors, scores=SCORES, probs=probs)
            else:
                chunked(*tensors, probs)
            seen.append(RECORDER.entries())
        assert seen[0] == seen[1]
        assert [r.calls for r in seen[0]] == ([] if quant_type == NONE else [1])


@runs_kernels
def test_no_tensor_grows_with_the_square_of_the_sequence(made):
    length = 160
    tensors = made(length, width=8, dtype=torch.bfloat16)
    probs = parts_of(QuantSpec("mxfp8"), tensors[0])
    with largest() as seen:
        gradients(kernel_attention(*tensors, scores=SCORES, probs=probs).cpu(), tensors)
    assert seen.elements < length**2, seen.operation


# -- what it leaves to chunks --------------------------------------------------------------------


WRONG = {
    "head dim": ({"width": 257}, {}, {}),
    "keys": ({"sk": 2 * LENGTH}, {}, {}),
    "dtype": ({"dtype": torch.float64}, {}, {}),
    "softmax": ({}, {"dtype": torch.float64}, {}),
    "a softmax that scales": ({"dtype": torch.bfloat16}, {"dtype": None, "factor": 2.0}, {}),
    "normalization": ({}, {"normalized": False}, {}),
    "squares": ({}, {}, {"quant_type": "nvfp4", "tile": "square"}),
    "amax": ({}, {}, {"quant_type": "hifp8", "tensor_scale": True}),
    "memory": ({"width": 256, "value_width": 256}, {}, {"quant_type": "fp8_block"}),
}


@runs_kernels
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_it_says_what_it_cannot_do(operands, wrong):
    shape, softmax, format_ = wrong
    tensors = [t.detach().to(DEVICE) for t in operands(LENGTH, **({"sk": LENGTH} | shape))]
    scores = Scores(**({"scale": 0.25, "dtype": torch.float32} | softmax))
    probs = parts_of(QuantSpec(**({"quant_type": "mxfp8"} | format_)), tensors[0])
    why = supports(*tensors, scores, probs)
    assert why
    with pytest.raises(ValueError) as error_:
        kernel_attention(*tensors, scores=scores, probs=probs)
    assert why in str(error_.value)


@runs_kernels
@pytest.mark.parametrize(
    "text", ["[record]\nevery = 1\n", "[record]\ndump = [1]\n", "[run]\ncheck_nan = true\n"]
)
def test_probabilities_that_are_looked_at_are_left_to_chunks(made, options, text):
    tensors = made()
    probs = parts_of(QuantSpec("mxfp8"), tensors[0])
    assert not supports(*tensors, SCORES, probs)
    options(text)
    RECORDER.begin_step(1)
    assert supports(*tensors, SCORES, probs)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes CPU tensors")
def test_a_cpu_tensor_is_left_to_chunks(operands):
    tensors = operands()
    assert supports(*tensors, SCORES, parts_of(QuantSpec("mxfp8"), tensors[0]))


# -- as compiled for an H100, which need not be there --------------------------------------------


COMPILED = [
    *((kind, torch.bfloat16, (128, 128)) for kind in (NONE, *SCALES)),
    ("mxfp8", torch.bfloat16, (192, 128)),
    ("fp8_block", torch.bfloat16, (256, 256)),
    ("nvfp4", torch.float16, (80, 64)),
    ("mxfp8", torch.float32, (128, 128)),
    ("hif4", torch.float32, (64, 64)),
]


compiles_ahead = pytest.mark.skipif(
    INTERPRETED or tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3),
    reason="the interpreter compiles nothing, and older versions take their source in another way",
)


def compiled(probs, query, key, value):
    """All three kernels for these operands, which have no storage."""
    statistic = query.new_empty(1, dtype=torch.float32)
    grad = query.new_empty(*query.shape[:3], value.size(-1))
    work = Work.of(query, key, value, SCORES, probs)

    def back():
        work.backward(grad, statistic, statistic)

    names = ["_queries_kernel", "_keys_kernel"]
    return [
        *ahead.compiled(forward, ["_kernel"], work.forward),
        *ahead.compiled(backward, names, back),
    ]


def without_storage(length, batch, heads, groups, widths, dtype=torch.bfloat16):
    shapes = ((heads, widths[0]), (groups, widths[0]), (groups, widths[1]))
    return [torch.empty(length, batch, *shape, dtype=dtype, device="meta") for shape in shapes]


@compiles_ahead
@pytest.mark.parametrize(("quant_type", "dtype", "widths"), COMPILED)
@pytest.mark.parametrize("rounding", [None, "stochastic"])
def test_it_compiles_within_what_a_program_has(quant_type, dtype, widths, rounding):
    heads = without_storage(8192, 2, 32, 8, widths, dtype)
    seed = None if rounding is None else SEED
    probs = parts_of(QuantSpec(quant_type, rounding=rounding), heads[0], seed)
    for kernel in compiled(probs, *heads):
        assert kernel.metadata.shared <= H100_BYTES
        ptx = kernel.asm["ptx"]
        # Subnormals are kept; half precision has tensor cores, float32 has its own products.
        assert ".ftz" not in ptx
        assert ("mma" in ptx) == (dtype != torch.float32)
        assert "tf32" not in ptx


@compiles_ahead
@pytest.mark.parametrize("sizes", [(4096, 1, 1, 1), (1, 1, 1, 1), (1, 2, 4, 2), (8191, 3, 6, 2)])
def test_it_compiles_where_sizes_are_one(sizes):
    """Triton takes a 1 for known at compile time."""
    heads = without_storage(*sizes, (72, 64))
    assert all(compiled(parts_of(QuantSpec("nvfp4"), heads[0]), *heads))


# -- on a device ---------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("quant_type", [NONE, *FORMATS])
@pytest.mark.parametrize("widths", [(128, 128), (192, 128)])
def test_sizes_of_models(made, quant_type, widths):
    """Two sequences of 2048: with codes of their own, as tests of chunks compare half precision."""
    shape = {"heads": 8, "groups": 2, "width": widths[0], "value_width": widths[1]}
    tensors = made(2048, dtype=torch.bfloat16, **shape)
    probs = parts_of(QuantSpec(quant_type), tensors[0])
    scores = Scores(widths[0] ** -0.5, None, torch.float32)
    if why := supports(*tensors, scores, probs):
        pytest.skip(why)
    expected = chunked(*tensors, probs, scores)
    right = gradients(expected.cpu(), tensors)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = kernel_attention(*tensors, scores=scores, probs=probs)
    # Not a byte for each score.
    assert torch.cuda.max_memory_allocated() - before < 2 * 8 * 2048**2
    assert error(found, expected) < 5e-3
    pairs = zip(gradients(found.cpu(), tensors), right, strict=True)
    assert all(error(one, other) < 2e-2 for one, other in pairs)
