import re
import types

import pytest
import torch
from mqo.errors import DriftError
from mqo.overlay import literals
from mqo.quant.formats import ATTENTION_BACKWARD

from .conftest import ATTENTION, PIN, SERIES, executed, planned, sites

LAYERS = "megatron/core/tensor_parallel/layers.py"

LINEAR_SOURCE = '''
"""A look-alike of a linear layer with a backward of its own."""
import torch


class LinearWithFrozenWeight:
    @staticmethod
    def forward(ctx, total_input, weight):
        return torch.matmul(total_input, weight.t())

    @staticmethod
    def backward(ctx, grad_output, weight):
        return grad_output.matmul(weight)


class LinearWithGradAccumulationAndAsyncCommunication:
    @staticmethod
    def forward(ctx, input, weight):
        total_input = input
        return torch.matmul(total_input, weight.t())

    @staticmethod
    def backward(ctx, grad_output):
        total_input, weight = ctx.saved_tensors
        dx = grad_output.matmul(weight)
        dw = None
        # Which kernel accumulates.
        if ctx.form == "fp32":
            fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(
                total_input, grad_output, weight.main_grad
            )
        elif ctx.form == "fp16":
            fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(
                total_input, grad_output, weight.main_grad)
        elif ctx.form == "out":
            torch.matmul(grad_output.t(), total_input, out=weight.main_grad)
        elif ctx.form == "te":
            te_general_gemm(total_input, grad_output, layout="NT", out=weight.main_grad)
        else:
            dw = grad_output.t().matmul(total_input)
        db = grad_output.sum(dim=0)
        return dx, dw, db
'''

ATTENTION_SOURCE = """
import torch


class OtherAttention:
    def forward(self, attention_probs, value):
        return torch.bmm(attention_probs, value.transpose(0, 1))


class DotProductAttention:
    softmax_scale = 0.5
    num_attention_heads_per_partition = num_query_groups_per_partition = 2

    def forward(self, query, key, value, matmul_input_buffer):
        # Grouped keys.
        if self.num_attention_heads_per_partition // self.num_query_groups_per_partition > 1:
            raise NotImplementedError
        scores = torch.baddbmm(
            matmul_input_buffer,
            query.transpose(0, 1),  # rows
            key.transpose(0, 1).transpose(1, 2),  # columns
            beta=0.0,
            alpha=self.softmax_scale,
        )
        attention_probs = scores.softmax(dim=-1)
        return torch.bmm(attention_probs, value.transpose(0, 1))
"""


class Recorder:
    """Stands for the quantizers: notes what comes in, and doubles what goes on."""

    def __init__(self):
        self.bound, self.seen, self.saved, self.order = [], [], [], []

    def gemm_operands(self, site, quant_type, owner):
        self.bound.append((site, quant_type, owner))

        def product(function):
            self.order.append((site, function.__name__))
            return function

        def side(name):
            def pass_on(tensor):
                self.order.append((site, name))
                self.seen.append((site, name, tensor))
                return 2 * tensor

            return pass_on

        return types.SimpleNamespace(
            lhs=side("lhs"),
            rhs=side("rhs"),
            save=lambda *saved: self.saved.append(saved),
            product=product,
        )

    def saved_operands(self, ctx):
        return ctx.unpacked


@pytest.fixture
def recorder(module):
    recorder = Recorder()
    module(
        "mqo.quant", gemm_operands=recorder.gemm_operands, saved_operands=recorder.saved_operands
    )
    return recorder


def accumulate(total_input, grad_output, *args, out=None, layout=None):
    (args[0] if args else out).copy_(grad_output.t() @ total_input)


@pytest.fixture
def linear():
    kernels = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    names = {"fused_weight_gradient_mlp_cuda": kernels, "te_general_gemm": accumulate}
    scope = executed("quant_sites", LAYERS, LINEAR_SOURCE, **names)
    return scope["LinearWithGradAccumulationAndAsyncCommunication"]


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    x, grad, weight = (torch.randn(n, 4, generator=generator) for n in (3, 3, 4))
    weight.main_grad = torch.zeros(4, 4)
    return x, grad, weight


# -- before and after --------------------------------------------------------------------------


def test_the_wgrad_literal_stands_behind_dgrads_gemm_and_above_every_form():
    new = sites("quant_sites", LAYERS, LINEAR_SOURCE)
    place = new.index("gemm_operands('wgrad'")
    assert new.index("dx = ") < place < new.index('if ctx.form == "fp32"')
    assert (
        "        # Which kernel accumulates.\n"
        "        custom_quant_type = 'none'\n"
        "        wgrad_operands = gemm_operands('wgrad', custom_quant_type, weight)\n"
    ) in new
    assert new.count("wgrad_operands.product(") == 5
    assert new.count("wgrad_operands.lhs(grad_output)") == 5
    assert new.count("wgrad_operands.rhs(total_input)") == 5


def test_qk_stands_before_grouped_keys_are_repeated_and_pv_at_its_gemm():
    new = sites("quant_sites", ATTENTION, ATTENTION_SOURCE)
    assert [t.site for t in literals.read(new.encode())] == ["qk", "pv"]
    assert "            qk_operands.lhs(query).transpose(0, 1),  # rows\n" in new
    assert "            qk_operands.rhs(key).transpose(0, 1).transpose(1, 2),  # columns\n" in new
    assert "            alpha=self.softmax_scale,\n" in new
    assert (
        "        # Grouped keys.\n"
        "        custom_quant_type = 'none'\n"
        "        qk_operands = gemm_operands('qk', custom_quant_type, self)\n"
        "        if self.num_attention_heads_per_partition //"
    ) in new
    assert new.index("softmax(") < new.index("gemm_operands('pv'")


@pytest.mark.parametrize(
    ("path", "source", "name"),
    [
        (LAYERS, LINEAR_SOURCE, "LinearWithFrozenWeight"),
        (ATTENTION, ATTENTION_SOURCE, "OtherAttention"),
    ],
)
def test_look_alikes_in_another_class_stay(path, source, name):
    def of_class(text):
        return re.search(rf"^class {name}:\n(?:    .*\n|\n)*", text, re.MULTILINE).group()

    assert of_class(sites("quant_sites", path, source)) == of_class(source)


def test_lines_are_added_and_gemms_wrapped_and_nothing_else_changes():
    new = sites("quant_sites", LAYERS, LINEAR_SOURCE)
    added = re.compile(
        r" *custom_quant_type = 'none'\n *\w+_operands = .*\n( *\w+_operands\.save.*\n)?"
        r"|from mqo\.quant.*\n"
    )
    unwrapped = re.sub(r"\w+_operands\.[lr]hs\((\w+)\)", r"\1", added.sub("", new))
    unwrapped = re.sub(r"\w+_operands\.product\(([\w.]+)\)", r"\1", unwrapped)
    unwrapped = unwrapped.replace("saved_operands(ctx)", "ctx.saved_tensors")
    others, changed = LINEAR_SOURCE.split("class LinearWithGrad")
    changed = re.sub(r"(grad_output(\.t\(\))?)\.matmul\(", r"torch.matmul(\1, ", changed)
    assert unwrapped == f"{others}class LinearWithGrad{changed}"


# -- what the patched source does --------------------------------------------------------------


def test_fprop_multiplies_what_the_quantizer_gave(recorder, linear, tensors):
    x, _, weight = tensors
    ctx = types.SimpleNamespace()
    y = linear.forward(ctx, x, weight)
    assert torch.equal(y, (2 * x) @ (2 * weight).t())
    assert recorder.bound == [("fprop", "none", weight)]
    assert recorder.saved == [(ctx, x, weight, x)]
    (_, _, lhs), (_, _, rhs) = recorder.seen
    assert lhs is x
    assert rhs is weight
    assert recorder.order == [("fprop", "matmul"), ("fprop", "lhs"), ("fprop", "rhs")]


@pytest.mark.parametrize("form", ["fp32", "fp16", "out", "te", "plain"])
def test_every_form_of_wgrad_multiplies_what_the_quantizer_gave(recorder, linear, tensors, form):
    x, grad, weight = tensors
    dx, dw, _ = linear.backward(types.SimpleNamespace(form=form, unpacked=(x, weight)), grad)
    wgrad = dw if form == "plain" else weight.main_grad
    assert torch.equal(dx, (2 * grad) @ (2 * weight))
    assert torch.equal(wgrad, (2 * grad).t() @ (2 * x))
    assert [(site, side) for site, side, _ in recorder.seen[:2]] == [
        ("dgrad", "lhs"),
        ("dgrad", "rhs"),
    ]
    assert recorder.order[0] == ("dgrad", "matmul")
    wrapped = "matmul" if form in ("out", "plain") else "accumulate"
    assert recorder.order[3] == ("wgrad", wrapped)  # before its operands
    by_side = {side: tensor for site, side, tensor in recorder.seen if site == "wgrad"}
    assert by_side["lhs"] is grad
    assert by_side["rhs"] is x


def test_the_bias_gradient_sums_the_gradient_itself(recorder, linear, tensors):
    x, grad, weight = tensors
    _, _, db = linear.backward(types.SimpleNamespace(form="plain", unpacked=(x, weight)), grad)
    assert torch.equal(db, grad.sum(dim=0))


def test_attention_multiplies_what_the_quantizers_gave(recorder):
    attention = executed("quant_sites", ATTENTION, ATTENTION_SOURCE)["DotProductAttention"]()
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, 2, 3, generator=generator) for _ in range(3))
    out = attention.forward(query, key, value, torch.empty(2, 5, 5))
    scores = 0.5 * torch.bmm(2 * query.transpose(0, 1), 2 * key.permute(1, 2, 0))
    probs = scores.softmax(dim=-1)
    # Scaling before or after the sum rounds differently by a few units in the last place.
    torch.testing.assert_close(out, torch.bmm(2 * probs, 2 * value.transpose(0, 1)))
    assert recorder.bound == [("qk", "none", attention), ("pv", "none", attention)]
    assert recorder.order == [
        *(("qk", "baddbmm"), ("qk", "lhs"), ("qk", "rhs")),
        *(("pv", "bmm"), ("pv", "lhs"), ("pv", "rhs")),
    ]
    assert [recorder.seen[i][2] is t for i, t in ((0, query), (1, key), (3, value))] == [True] * 3


# -- other releases ----------------------------------------------------------------------------


def older(version):
    """The linear look-alike with the forms of wgrad that release `version` has."""
    later = [("te", "0.18"), ("out", "0.14")]
    text = LINEAR_SOURCE
    for form in (form for form, since in later if version < since):
        text = re.sub(rf'        elif ctx\.form == "{form}":\n.*\n', "", text)
    return text


@pytest.mark.parametrize(("version", "forms"), [("0.12.0", 3), ("0.14.0", 4), ("0.17.1", 4)])
def test_a_release_is_patched_with_the_forms_that_it_has(version, forms):
    new = sites("quant_sites", LAYERS, older(version), version)
    assert new.count("wgrad_operands.rhs(total_input)") == forms


def test_a_form_that_the_release_should_have_is_missed():
    with pytest.raises(DriftError, match=r"te_general_gemm.* 0 .* 1"):
        sites("quant_sites", LAYERS, older("0.17.1"), PIN)


def test_the_helpers_of_0_20_are_handed_wrapped_operands():
    first, second = LINEAR_SOURCE.split("class LinearWithGrad")
    second = second.replace(
        "torch.matmul(total_input, weight.t())", "_linear_forward(total_input, weight, None, None)"
    )
    helper = '_wgrad_gemm({}, grad_output, total_input)\n        elif ctx.form == "{}":\n'
    made = helper.format("weight.main_grad", "sharded")
    made += f"            {helper.format('sharded_weight.get_wgrad_tensor()', 'none')}"
    te = 'te_general_gemm(total_input, grad_output, layout="NT", out=weight.main_grad)\n'
    source = f"{first}class LinearWithGrad{second}".replace(te, made + "            pass\n")
    new = sites("quant_sites", LAYERS, source, "0.20.0")
    assert "(_linear_forward)(fprop_operands.lhs(total_input), fprop_operands.rhs(weight)," in new
    assert new.count("wgrad_operands.rhs(total_input)") == 6
    assert new.count("_operands.lhs(grad_output), wgrad_operands.rhs(total_input))") == 2


def test_the_series_does_not_claim_a_release_that_was_not_tried():
    assert not SERIES.supports("0.20.0")


# -- the real source ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pristine(vendored):
    read = vendored.pristine
    return {path: read(path) for path in (LAYERS, ATTENTION)}


def test_the_tree_holds_exactly_the_literals_of_the_sites(vendored):
    found = {path: literals.read(vendored.read(path)) for path in (LAYERS, ATTENTION)}
    assert {path: [t.site for t in ts] for path, ts in found.items()} == {
        LAYERS: ["fprop", "dgrad", "wgrad"],
        ATTENTION: [*ATTENTION_BACKWARD, "qk", "pv"],
    }
    others = [p for p in vendored.upstream().files if p.endswith(".py") and p not in found]
    assert [p for p in others if literals.VARIABLE.encode() in vendored.read(p)] == []


@pytest.mark.parametrize(
    ("path", "gemm", "scope"),
    [
        (LAYERS, b"torch.matmul(total_input, weight.t())", "forward"),
        (LAYERS, b"grad_output.matmul(weight)", "backward"),
        (LAYERS, b"grad_output.t().matmul(total_input)", "backward"),
        (ATTENTION, b"torch.bmm(attention_probs, value.transpose(0, 1))", "forward"),
    ],
)
def test_a_gemm_that_upstream_renamed_or_doubled_stops_the_patch(
    vendored, pristine, path, gemm, scope
):
    version = vendored.upstream().version
    for other, times in ((b"elsewhere()", 0), (b"[" + gemm + b", " + gemm + b"][0]", 2)):
        at = pristine[path].rindex(gemm)
        source = pristine[path][:at] + other + pristine[path][at + len(gemm) :]
        with pytest.raises(DriftError, match=rf"\.{scope}.* {times} .* 1"):
            planned("quant_sites", version, {**pristine, path: source})


def test_patching_what_is_patched_stops(vendored, pristine):
    version = vendored.upstream().version
    once = {p: f.content for p, f in planned("quant_sites", version, pristine).items()}
    with pytest.raises(DriftError, match=r" 0 .* 1"):
        planned("quant_sites", version, once)
