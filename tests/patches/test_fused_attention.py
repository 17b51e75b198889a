import json
import sys
import types

import pytest
import torch
from mqo.errors import DriftError
from mqo.overlay import literals
from mqo.overlay.quant_types.modifier import check
from mqo.overlay.series import Series
from mqo.overlay.snapshot import snapshot
from mqo.project import Project
from mqo.quant.formats import ATTENTION_BACKWARD

from .. import forking
from .conftest import patched_attention

SOURCE = """
import torch


class DotProductAttention:
    softmax_scale = 0.5
    num_attention_heads_per_partition, num_query_groups_per_partition = 4, 2

    def forward(self, query, key, value, attention_mask, packed_seq_params=None):
        assert packed_seq_params is None, "not supported"
        # Grouped keys.
        if self.num_attention_heads_per_partition // self.num_query_groups_per_partition > 1:
            key, value = (torch.repeat_interleave(t, 2, dim=2) for t in (key, value))
        matmul_input_buffer = self.scratch()
        scores = torch.baddbmm(
            matmul_input_buffer, query.transpose(0, 1), key.transpose(0, 1).transpose(1, 2), beta=0
        )
        attention_probs = scores.softmax(dim=-1)
        return torch.bmm(attention_probs, value.transpose(0, 1))

    def scratch(self):
        raise NotImplementedError
"""


def patched(source=SOURCE):
    """`source` after the QK and PV literals and the branch."""
    return patched_attention(source, "quant_sites", "fused_attention")


def test_the_branch_stands_behind_the_qk_literal_and_before_grouped_keys_are_repeated():
    assert (
        "        # Grouped keys.\n"
        "        custom_quant_type = 'none'\n"
        "        qk_operands = gemm_operands('qk', custom_quant_type, self)\n"
        "        backward_operands = attention_backward_operands(self)\n"
        "        attend = without_scores(\n"
        "            self, SITE_TYPES, "
    ) in patched()
    sites = [literal.site for literal in literals.read(patched().encode())]
    assert sites == [*ATTENTION_BACKWARD, "qk", "pv"]
    assert patched().count("gemm_operands('qk'") == 1


def test_without_the_place_for_it_the_patch_stops():
    with pytest.raises(DriftError, match=r"per_partition > 1.* 0 .* 1"):
        patched(SOURCE.replace("_partition > 1", "_partition != 1"))


@pytest.fixture
def attention(module):
    """The look-alike, patched, beside what the branch calls; `ran` notes what that was given."""
    ran = []

    def without_scores(layer, site_types, query, key, mask, packed, backward):
        ran.append((site_types, query, key, mask, packed, backward))
        return (lambda *args: args) if layer.fuses else None

    module("mqo.megatron.attention.choice", without_scores=without_scores)
    module("mqo.megatron.attention.backward", BackwardOperands=dict)
    operands = types.SimpleNamespace(
        lhs=lambda t: 2 * t, rhs=lambda t: 3 * t, product=lambda function: function
    )
    module("mqo.quant", gemm_operands=lambda *args: operands, site_types=lambda path: path)
    tracker = types.SimpleNamespace(get_cuda_rng_tracker=lambda: "the tracker")
    scope = {"__file__": "a path", "tensor_parallel": tracker}
    exec(patched(), scope)
    layer = scope["DotProductAttention"]()
    layer.ran = ran
    return layer


def test_a_path_without_scores_gets_the_operands_and_allocates_nothing(attention):
    query, key, value, mask = (torch.full((1, 1, 2, 1), float(n)) for n in range(4))
    attention.fuses = True
    qk, *tensors, tracker = attention.forward(query, key, value, mask)
    assert torch.equal(qk.lhs(query), 2 * query)
    assert all(one is other for one, other in zip(tensors, (query, key, value), strict=True))
    assert tracker == "the tracker"
    backward = dict.fromkeys(ATTENTION_BACKWARD, qk)
    assert attention.ran == [("a path", query, key, mask, None, backward)]


def test_packed_sequences_get_as_far_as_the_branch(attention):
    attention.fuses = True
    tensors = [torch.ones(1, 2, 1) for _ in range(3)]
    packed = types.SimpleNamespace(qkv_format="thd")
    assert attention.forward(*tensors, None, packed)
    assert attention.ran[0][-2] is packed
    packed.qkv_format = "sbhd"
    with pytest.raises(AssertionError, match="not supported"):
        attention.forward(*tensors, None, packed)


def test_else_upstreams_own_path_runs(attention):
    attention.fuses = False
    with pytest.raises(NotImplementedError):  # where it allocates its scores
        attention.forward(*(torch.ones(1, 1, 2, 1) for _ in range(4)))


# -- the real source ---------------------------------------------------------------------------


def test_the_modifier_finds_both_literals_of_attention_in_the_tree(vendored):
    states = {state.site.name: state.site for state in check(vendored.root).sites}
    for site in ("qk", "pv"):
        assert states[site].bound
        assert not states[site].refusal


# A small GPT of the snapshot that the program lies in, in the dtype of its argument, by both paths:
# losses, the largest gradient deviations, the largest tensors of a forward and backward pass.
COMPARISON = """
import json, sys

sys.path.insert(0, sys.argv[1] + "/tools")
import verify_forward

sys.path[0] = sys.argv[1]
import torch
from torch.utils._python_dispatch import TorchDispatchMode

verify_forward.SEQUENCE = 512


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def step(backend):
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.attention_backend = backend
    model.zero_grad(set_to_none=True)
    with Largest() as largest:
        loss = verify_forward.mean_loss(model)
        loss.backward()
    gradients = [p.grad.float() for p in model.parameters()]
    return loss.item(), gradients, largest.elements


verify_forward.start()
normalization, make_spec = verify_forward.local_spec()
model = verify_forward.build(verify_forward.llama_configuration(normalization), make_spec())
model.to(getattr(torch, sys.argv[2]))
(loss, grads, elements), (fused_loss, fused_grads, fused_elements) = map(step, ("unfused", "auto"))
off = max(((f - g).norm() / g.norm()).item() for f, g in zip(fused_grads, grads))
sizes = {"unfused": elements, "auto": fused_elements}
print(json.dumps({"losses": [loss, fused_loss], "off": off, "sizes": sizes}))
"""


@pytest.fixture(scope="module")
def source(vendored, tmp_path_factory):
    """A snapshot a type of QK and one of PV."""
    series, made = Series.of_project(Project.here()), {}

    def take(qk, pv):
        if (qk, pv) not in made:
            made[qk, pv] = tmp_path_factory.mktemp("source") / "tree"
            snapshot(vendored, made[qk, pv], types={"qk": qk, "pv": pv}, series=series)
        return made[qk, pv]

    return take


@pytest.mark.parametrize(
    ("qk", "pv", "dtype", "tolerance"),
    [
        ("none", "none", "float32", 1e-5),
        ("mxfp8", "none", "float32", 1e-5),
        ("none", "none", "bfloat16", 5e-3),
        ("none", "mxfp4", "float32", 1e-5),
        ("nvfp4", "nvfp4", "float32", 1e-5),
        ("mxfp8", "mxfp8", "bfloat16", 5e-3),
    ],
)
@pytest.mark.slow
def test_a_small_gpt_has_the_same_loss_without_scores(source, qk, pv, dtype, tolerance):
    command = [sys.executable, "-W", "ignore", "-c", COMPARISON, str(source(qk, pv)), dtype]
    done = forking.run(command)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    loss, fused_loss = facts["losses"]
    assert fused_loss == pytest.approx(loss, rel=tolerance)
    assert facts["off"] < (0.1 if dtype == "bfloat16" else 0.01)
    assert facts["off"] > 0 or pv != "none"  # one chunk may give the same bits
    # Two sequences of 512 tokens, 4 heads. The test's own mask is all that is left of s x s, or a
    # chunk: so many scores make one.
    sizes = facts["sizes"]
    assert sizes["unfused"] == 2 * 4 * 512 * 512
    assert sizes["auto"] == (512 * 512 if pv == "none" else 2**20)
