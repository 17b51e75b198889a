"""Where the first value that is not finite is seen."""

import math

import pytest
import torch
from mqo.megatron.run.nan import watch
from mqo.quant.finite import FiniteError
from mqo.quant.gemms import gemm_operands
from mqo.quant.progress import set_step
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.second.weight.mqo_layer = "decoder.layers.0.mlp.linear_fc1"

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def test_the_layer_whose_output_is_first_is_named():
    net = Net()
    with torch.no_grad():
        net.second.weight[0, 0] = math.nan
    watch([net])
    set_step(6)
    found = r"NaN .*output of decoder\.layers\.0\.mlp\.linear_fc1, .* 7"
    with pytest.raises(FiniteError, match=found):
        net(torch.ones(2, 32))


def test_an_infinite_gradient_is_named_where_it_comes_back_to():
    net = Net()
    watch([net])
    out = net(torch.ones(2, 32))
    with pytest.raises(FiniteError, match=r"Inf .*gradient of third"):
        out.backward(torch.full_like(out, math.inf))


def test_a_finite_step_goes_on():
    net = Net()
    watch([net])
    net(torch.ones(2, 32)).sum().backward()
    assert net.first.weight.grad is not None


def test_a_site_is_named_with_its_operand(options):
    options('[quantizer]\nscale_rule = "ceil"\n[run]\ncheck_nan = true\n')
    # 65504 becomes 65536, which float16 does not hold.
    x = torch.full((32,), 65504.0, dtype=torch.float16)
    with pytest.raises(FiniteError, match=r"Inf .*x .*fprop .*mxfp8.*unlabeled"):
        gemm_operands("fprop", "mxfp8", None).lhs(x)
    with pytest.raises(FiniteError, match=r"NaN .*key .*qk.*unlabeled"):
        gemm_operands("qk", "mxfp8", None).rhs(x * math.nan)
