"""Trees of others that were patched by hand: MQO_FORKS lists their folders, separated by colons.

Run on 2026-11-26 on commits 5a314b358d, ccd5d2568c and 5ed1dd6861 of NVIDIA/Megatron-LM's store.
"""

import os
import shutil

import pytest
from mqo.overlay.quant_types import modifier
from mqo.overlay.quant_types.sites import METHODS, scan
from mqo.quant.formats import QUANT_TYPES
from mqo.quant.source import splice

FORKS = [path for path in os.environ.get("MQO_FORKS", "").split(":") if path]
pytestmark = [
    pytest.mark.skipif(not FORKS, reason="MQO_FORKS names no tree that was patched by hand"),
    pytest.mark.parametrize("fork", FORKS),
]


@pytest.fixture
def root(fork, tmp_path):
    """The files with sites, copied."""
    for path in METHODS:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(f"{fork}/{path}", tmp_path / path)
    return tmp_path


def read(root):
    return {path: (root / path).read_bytes() for path in METHODS}


def test_each_site_is_set_in_its_literals_alone_and_restored(root):
    before = read(root)
    sites = [state.site for state in modifier.check(root).sites if not state.site.refusal]
    assert sites
    for site in sites:
        (literals,) = (s.literals for s in scan(site.path, before[site.path]).sites if s == site)
        for value in QUANT_TYPES:
            expected = splice(before[site.path], dict.fromkeys(literals, value))
            modifier.modify(root, {site.name: value}, shared=True)
            assert read(root) == before | {site.path: expected}
        modifier.restore(root)
        assert read(root) == before
