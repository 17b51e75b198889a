import json
import sys
import types

import pytest
import torch
from mqo.errors import DriftError
from mqo.overlay import literals
from mqo.overlay.quant_types.modifier import check
from mqo.overlay.rewrite import rewrite
from mqo.overlay.series import Series
from mqo.overlay.snapshot import snapshot
from mqo.project import Project

from .. import forking
from .conftest import PIN, SERIES

ATTENTION = "megatron/core/transformer/dot_product_attention.py"

SOURCE = """
import torch


class DotProductAttention:
    softmax_scale = 0.5
    num_attention_heads_per_partition, num_query_groups_per_partition = 4, 2

    def forward(self, query, key, value, attention_mask):
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
    for name in ("quant_sites", "fused_attention"):
        (edits,) = (e for e in SERIES[name].load_edits() if e.path == ATTENTION)
        source = rewrite(source.encode(), edits, PIN, name).decode()
    return source


def test_the_branch_stands_behind_the_qk_literal_and_before_grouped_keys_are_repeated():
    assert (
        "        # Grouped keys.\n"
        "        custom_quant_type = 'none'\n"
        "        qk_operands = gemm_operands('qk', custom_quant_type, self)\n"
        "        if runs_fused(self, SITE_TYPES, query, key, attention_mask):\n"
    ) in patched()
    assert [literal.site for literal in literals.read(patched().encode())] == ["qk", "pv"]
    assert patched().count("gemm_operands('qk'") == 1


def test_without_the_place_for_it_the_patch_stops():
    with pytest.raises(DriftError, match=r"per_partition > 1.* 0 times instead of 1"):
        patched(SOURCE.replace("_partition > 1", "_partition != 1"))


@pytest.fixture
def attention(module):
    """The look-alike, patched, beside what the branch calls; `ran` notes what that was given."""
    ran = []

    def runs_fused(layer, site_types, query, key, mask):
        ran.append((site_types, query, key, mask))
        return layer.fuses

    module("megatron.attention", runs_fused=runs_fused, fused_context=lambda *args: args)
    operands = types.SimpleNamespace(lhs=lambda t: 2 * t, rhs=lambda t: 3 * t)
    module("megatron.quant", gemm_operands=lambda *args: operands, site_types=lambda path: path)
    tracker = types.SimpleNamespace(get_cuda_rng_tracker=lambda: "the tracker")
    scope = {"__file__": "a path", "tensor_parallel": tracker}
    exec(patched(), scope)
    layer = scope["DotProductAttention"]()
    layer.ran = ran
    return layer


def test_the_fused_path_gets_the_quantized_query_and_key_and_allocates_nothing(attention):
    query, key, value, mask = (torch.full((1, 1, 2, 1), float(n)) for n in range(4))
    attention.fuses = True
    layer, lhs, rhs, third, tracker = attention.forward(query, key, value, mask)
    assert layer is attention
    assert torch.equal(lhs, 2 * query)
    assert torch.equal(rhs, 3 * key)
    assert third is value
    assert tracker == "the tracker"
    assert attention.ran == [("a path", query, key, mask)]


def test_else_upstreams_own_path_runs(attention):
    attention.fuses = False
    with pytest.raises(NotImplementedError):  # where it allocates its scores
        attention.forward(*(torch.ones(1, 1, 2, 1) for _ in range(4)))


# -- the real source ---------------------------------------------------------------------------


def test_the_modifier_finds_both_literals_of_attention_in_the_tree(vendored):
    states = {state.place.site: state.place for state in check(vendored.root).sites}
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
(loss, grads, elements), (fused_loss, fused_grads, fused_elements) = map(step, ("unfused", "flash"))
off = max(((f - g).norm() / g.norm()).item() for f, g in zip(fused_grads, grads))
sizes = {"unfused": elements, "flash": fused_elements}
print(json.dumps({"losses": [loss, fused_loss], "off": off, "sizes": sizes}))
"""


@pytest.fixture(scope="module")
def source(vendored, tmp_path_factory):
    """A snapshot a QK type."""
    series, made = Series.of(Project.here()), {}

    def take(quant_type):
        if quant_type not in made:
            made[quant_type] = tmp_path_factory.mktemp("source") / quant_type
            snapshot(vendored, made[quant_type], types={"qk": quant_type}, series=series)
        return made[quant_type]

    return take


@pytest.mark.parametrize(
    ("quant_type", "dtype", "tolerance"),
    [("none", "float32", 1e-5), ("mxfp8", "float32", 1e-5), ("none", "bfloat16", 5e-3)],
)
@pytest.mark.slow
def test_a_small_gpt_has_the_same_loss_fused_and_holds_no_scores(
    source, quant_type, dtype, tolerance
):
    command = [sys.executable, "-W", "ignore", "-c", COMPARISON, str(source(quant_type)), dtype]
    done = forking.run(command)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    loss, fused_loss = facts["losses"]
    assert fused_loss == pytest.approx(loss, rel=tolerance)
    assert 0 < facts["off"] < (0.1 if dtype == "bfloat16" else 0.01)
    # Two sequences of 512 tokens, 4 heads. The test's own mask is all that is left of s x s.
    assert facts["sizes"] == {"unfused": 2 * 4 * 512 * 512, "flash": 512 * 512}
