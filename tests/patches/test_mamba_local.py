"""The choice between mamba_ssm's functions and ours: in a look-alike of our own of the mixer."""

import pytest
import torch
from mqo.megatron.mamba import kernels

from .conftest import executed, planned

PATH = "megatron/core/ssm/mamba_mixer.py"
SOURCE = """
HAVE_MAMBA_SSM = {found}
causal_conv1d_fn = RMSNormGated = "theirs"
mamba_chunk_scan_combined = mamba_split_conv1d_scan_combined = "theirs"

if not HAVE_MAMBA_SSM:
    RMSNormGated = "a mock"


class MambaMixer:
    def __init__(self):
        if not HAVE_MAMBA_SSM:
            raise ImportError("mamba_ssm")
"""
FUNCTIONS = ("causal_conv1d_fn", "mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined")


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("found", [True, False])
def test_upstreams_kernels_where_they_run_and_ours_elsewhere(monkeypatch, found, cuda):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    scope = executed("mamba_local", PATH, SOURCE.format(found=found), __name__="mixer")
    scope["MambaMixer"]()
    theirs = found and cuda
    for name in FUNCTIONS:
        assert scope[name] == ("theirs" if theirs else getattr(kernels, name))
    assert scope["RMSNormGated"] == ("theirs" if theirs else kernels.RMSNorm)


def test_releases_without_a_hybrid_model_are_left_alone():
    files = {PATH: SOURCE.format(found=False).encode()}
    assert planned("mamba_local", "0.18.0", files)
    assert not planned("mamba_local", "0.17.1", files)
