"""Grouped experts against the same experts one by one: operands, results, gradients, refusals."""

from types import SimpleNamespace

import pytest
import torch
from mqo.megatron import experts
from mqo.megatron.layers import label_layers
from mqo.quant.progress import set_step
from mqo.quant.record import RECORDER

EXPERTS, HIDDEN, WIDTH = 4, 64, 96
COUNTS = (5, 0, 33, 16)
LINEAR = ("fprop", "dgrad", "wgrad")


@pytest.fixture
def build(groups):
    """A function that builds a rank's experts, grouped or not, always with the same weights."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer import TransformerConfig

    def built(grouped, **config):
        config = {
            **{"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2},
            **{"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": WIDTH, "moe_router_topk": 2},
            **{"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
            **{"add_bias_linear": False, "use_cpu_initialization": True},
            **config,
        }
        torch.manual_seed(2)
        make = LocalSpecProvider().grouped_mlp_modules(grouped)
        model = make(EXPERTS, TransformerConfig(**config), pg_collection=groups)
        label_layers(model, "experts")
        return model

    return built


@pytest.fixture
def typed(monkeypatch):
    """A function that gives the linear sites a type, as the source would, and logs operands."""
    from megatron.core.tensor_parallel import layers

    real, seen = experts.gemm_operands, []

    class Logged:
        def __init__(self, operands, place):
            self.operands, self.place = operands, place

        def lhs(self, tensor):
            return self.log("lhs", self.operands.lhs(tensor))

        def rhs(self, tensor):
            return self.log("rhs", self.operands.rhs(tensor))

        def log(self, side, tensor):
            seen.append(((*self.place, side), tensor.detach().clone()))
            return tensor

        def __getattr__(self, name):
            return getattr(self.operands, name)

    def start(quant_type):
        def operands(site, _, owner):
            return Logged(real(site, quant_type, owner), (site, owner.mqo_layer))

        monkeypatch.setattr(layers, "gemm_operands", operands)
        monkeypatch.setattr(experts, "gemm_operands", operands)
        return seen

    return start


def step(model, dtype=torch.float32, counts=COUNTS):
    """Output and gradients, of the tokens and of each weight."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(sum(counts), HIDDEN, generator=generator).to(dtype).requires_grad_()
    probs = torch.rand(sum(counts), generator=generator)
    out, bias = model(hidden, torch.tensor(counts), probs)
    assert bias is None
    out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return {"out": out.detach(), "hidden": hidden.grad, **grads}


def error(found, expected):
    largest = max(float(expected.abs().max()), 1e-30) if expected.numel() else 1.0
    return float((found - expected).abs().max()) / largest if expected.numel() else 0.0


CASES = {
    "none": ("none", ""),
    "mxfp8": ("mxfp8", ""),
    "mxfp4 stochastic": ("mxfp4", '[quantizer]\nrounding = "stochastic"'),
    "nvfp4": ("nvfp4", ""),
    "fp8 of tensors": ("fp8_tensor_e4m3", ""),
    "packed": ("mxfp8", '[quantizer]\nsave_activations = "packed"'),
    "cached": ("mxfp8", "[quantizer]\ncache_weights = true"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_operands_are_the_same_to_the_bit_and_results_to_rounding(build, typed, options, case):
    quant_type, text = case
    options(text)
    seen = typed(quant_type)
    ran = []
    for grouped in (False, True):
        RECORDER.reset()
        set_step(0)
        seen.clear()
        found = step(build(grouped))
        ran.append((dict(seen), found, RECORDER.entries()))
    (operands, expected, records), (others, found, same) = ran
    assert operands.keys() == others.keys()
    assert len(operands) == 2 * 2 * EXPERTS * len(LINEAR)
    assert all(others[place].equal(tensor) for place, tensor in operands.items())
    assert same == records
    assert bool(records) == (quant_type != "none")
    assert max(error(found[name], expected[name]) for name in expected) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(build, dtype):
    one_by_one, grouped = (step(build(how).to(dtype), dtype) for how in (False, True))
    assert all(error(grouped[name], one_by_one[name]) < 1e-2 for name in grouped)


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 40)])
def test_experts_without_tokens(build, typed, counts):
    typed("mxfp8")
    one_by_one, grouped = (step(build(how), counts=counts) for how in (False, True))
    assert all(error(grouped[name], one_by_one[name]) < 1e-6 for name in grouped)


def test_weights_have_the_names_of_experts_one_by_one(build):
    one_by_one, grouped = build(False), build(True)
    assert list(grouped.state_dict()) == list(one_by_one.state_dict())
    assert isinstance(grouped, type(one_by_one))
    grouped.load_state_dict(one_by_one.state_dict())


def test_frozen_weights_run_as_experts_one_by_one(build, typed):
    seen = typed("mxfp8")
    model = build(True).requires_grad_(False)
    step(model)
    assert not seen


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"add_bias_linear": True}, "--disable-bias-linear"),
        (
            {
                "recompute_granularity": "selective",
                "recompute_modules": ["moe_act"],
                "moe_grouped_gemm": True,
            },
            "moe_act",
        ),
    ],
)
def test_what_grouped_experts_do_not_do_is_refused(build, config, named):
    build(False, **config)
    with pytest.raises(ValueError, match=named):
        build(True, **config)


def test_an_older_torch_is_refused(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    with pytest.raises(ValueError) as error:
        experts.check(SimpleNamespace())
    assert str(error.value) == (
        f"torch {torch.__version__} has no grouped product. Expected: torch 2.10 or newer, or no "
        "--moe-grouped-gemm"
    )


def test_one_expert_is_upstreams_own_pass():
    class OneByOne(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(
                add_bias_linear=False, recompute_granularity=None, recompute_modules=None
            )
            self.local_experts = torch.nn.ModuleList([torch.nn.Module()])
            layer = torch.nn.Linear(2, 2, bias=False)
            self.local_experts[0].linear_fc1 = self.local_experts[0].linear_fc2 = layer

        def forward(self, *given):
            return given

    assert experts.experts_class(False, OneByOne) is OneByOne
    assert experts.experts_class(True, OneByOne)()(1, 2, 3) == (1, 2, 3)
