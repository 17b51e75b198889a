"""The convolution against torch's, and the gated norm against its formula."""

import pytest
import torch
from mqo.megatron.mamba.elementwise import GatedRMSNorm, causal_conv
from torch.nn.functional import conv1d, silu


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_the_convolution_is_torchs_with_one_group_per_channel(tokens, bias):
    tensors = [draw(2, tokens, 6), draw(6, 4), *([draw(6)] if bias else [])]
    ours = [t.clone().requires_grad_() for t in tensors]
    right = [t.clone().double().requires_grad_() for t in tensors]
    y = causal_conv(*ours, *([] if bias else [None]))
    x, weight, *rest = right
    z = conv1d(x.transpose(1, 2), weight[:, None], *rest, padding=3, groups=6)[..., :tokens]
    torch.testing.assert_close(y, z.transpose(1, 2).float())
    weights = draw(*y.shape)
    (y * weights).sum().backward()
    (z.transpose(1, 2) * weights).sum().backward()
    for mine, exact in zip(ours, right, strict=True):
        torch.testing.assert_close(mine.grad, exact.grad.float())


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_norm_is_its_formula_per_group(groups, gated, before):
    norm = GatedRMSNorm(12, eps=1e-3, group_size=12 // groups, norm_before_gate=before)
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    x, z = draw(5, 2, 12), draw(2, 5, 12).transpose(0, 1)
    y = x.double() * (1 if before or not gated else silu(z.double()))
    for part in y.split(12 // groups, -1):
        part /= ((part**2).mean(-1, keepdim=True) + 1e-3).sqrt()
    y = y * norm.weight.double() * (silu(z.double()) if before and gated else 1)
    torch.testing.assert_close(norm(x, z if gated else None), y.float())


def test_bf16_is_computed_in_fp32_and_rounded_once():
    norm = GatedRMSNorm(8, norm_before_gate=False, dtype=torch.bfloat16)
    x, z = draw(4, 8).bfloat16(), draw(8, 4).T.bfloat16()
    wide = GatedRMSNorm(8, norm_before_gate=False)
    assert torch.equal(norm(x, z), wide(x.float(), z.float()).bfloat16())
