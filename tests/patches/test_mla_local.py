"""Multi-latent attention out of local modules: look-alikes of our own, and the real source."""

import math
import types

import pytest
from mqo.errors import DriftError
from mqo.overlay.edits import covers

from .conftest import ATTENTION, SERIES, executed, sites

RESOLVER = "megatron/core/transformer/mla_qk_norm_config.py"

ATTENTION_SOURCE = """
import math


class DotProductAttention:
    def __init__(self, config, softmax_scale=None):
        self.config = config
        width = self.config.kv_channels * config.heads
        self.hidden_size_per_partition = width
        self.hidden_size_per_attention_head = width // config.heads
        self.softmax_scale = softmax_scale
        if softmax_scale is None:
            self.softmax_scale = 1 / math.sqrt(self.hidden_size_per_attention_head)
"""
RESOLVER_SOURCE = """
class QKNormConfigResolver:
    def __init__(self, fused):
        self.fused_norm_linear_impl, self.linear_impl = fused, "linear"

    def _raise_unused_q_norm(self):
        raise ValueError("a norm that nothing uses")

    def _mla_fused_linear_or_default(self, module_spec, module_name):
        if self.fused_norm_linear_impl is None:
            raise RuntimeError("no fused one for " + module_name)
        return self.fused_norm_linear_impl
"""
CONFIG = types.SimpleNamespace(kv_channels=8, heads=4)


@pytest.fixture
def attention():
    return executed("mla_local", ATTENTION, ATTENTION_SOURCE)["DotProductAttention"]


@pytest.fixture
def resolver():
    return executed("mla_local", RESOLVER, RESOLVER_SOURCE)["QKNormConfigResolver"]


def test_the_output_has_the_heads_of_the_values_and_scores_the_scale_of_the_keys(attention):
    made = attention(CONFIG, k_channels=24, v_channels=16)
    assert made.hidden_size_per_partition == 16 * 4
    assert made.softmax_scale == 1 / math.sqrt(24)


def test_a_scale_that_is_given_counts(attention):
    assert attention(CONFIG, 0.25, k_channels=24, v_channels=16).softmax_scale == 0.25


def test_without_head_sizes_nothing_changes(attention):
    made = attention(CONFIG)
    assert made.hidden_size_per_partition == 8 * 4
    assert made.softmax_scale == 1 / math.sqrt(8)


def test_queries_without_latents_need_no_norm(resolver):
    local = resolver(fused=None)
    local._raise_unused_q_norm()
    assert local._mla_fused_linear_or_default("column", "linear_q_proj") == "column"
    assert local._mla_fused_linear_or_default(None, "linear_q_proj") == "linear"


def test_what_has_latents_still_needs_its_norm(resolver):
    with pytest.raises(RuntimeError, match="no fused one for linear_kv_up_proj"):
        resolver(fused=None)._mla_fused_linear_or_default("column", "linear_kv_up_proj")


def test_another_implementation_is_held_to_upstreams_rules(resolver):
    fused = resolver(fused="fused")
    with pytest.raises(ValueError, match="a norm that nothing uses"):
        fused._raise_unused_q_norm()
    assert fused._mla_fused_linear_or_default("column", "linear_kv_up_proj") == "fused"
    # But where there are no latents it has no norm either, as in other releases.
    assert fused._mla_fused_linear_or_default("column", "linear_q_proj") == "column"


def test_a_release_that_takes_head_sizes_itself_stops_the_patch():
    source = ATTENTION_SOURCE.replace("softmax_scale=None", "softmax_scale=None, v_channels=None")
    with pytest.raises(DriftError, match="parameter `v_channels`"):
        sites("mla_local", ATTENTION, source)


@pytest.mark.parametrize(("version", "files"), [("0.10.0", 1), ("0.18.2", 1), ("0.19.2", 2)])
def test_the_norms_rules_are_new_in_0_19(version, files):
    edits = [edit for edit in SERIES["mla_local"].load_edits() if covers(edit.versions, version)]
    assert len(edits) == files
    assert SERIES["mla_local"].applies_to(version)
