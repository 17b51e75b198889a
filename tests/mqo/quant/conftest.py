"""Fresh options and records for every test, one thread, and a bit-for-bit comparison."""

import os
from pathlib import Path

import pytest
import torch
from mqo.quant import backend, hadamard

from ...fresh_options import fresh_state as fresh_state
from ...fresh_options import options as options
from ...process_groups import no_group_left as no_group_left
from ...process_groups import one_rank as one_rank

torch.set_num_threads(1)
# Kernels compile once for all test runs of this checkout, and nothing is left in the user's cache.
os.environ.setdefault("MQO_KERNEL_CACHE", str(Path(__file__).parents[3] / ".cache" / "kernels"))

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.fixture(scope="session")
def assert_same_bits():
    """A function that compares bit patterns, so that -0.0 is not 0.0; any NaN equals any NaN."""

    def check(actual, expected):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        integer = _INTEGERS[actual.dtype]
        same = actual.contiguous().view(integer) == expected.contiguous().view(integer)
        same |= actual.isnan() & expected.isnan()
        assert same.all(), f"{actual[~same][:8]} is not {expected[~same][:8]}"

    return check


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def forget_implementations():
    """Have the next call choose an implementation anew, and warn anew."""
    for cached in (backend._load, backend._warn_of_reference, hadamard._load):
        cached.cache_clear()


@pytest.fixture
def no_choice(monkeypatch):
    """No implementation is asked for, and none was chosen before."""
    monkeypatch.delenv(backend.ENVIRONMENT_VARIABLE, raising=False)
    forget_implementations()
    yield
    forget_implementations()


@pytest.fixture
def equal_on_two_ranks(tmp_path):
    """A function that runs a program of this folder on two ranks, which each say EQUAL."""
    from ...vendored_tree import run_ranks  # skips the test without the tree

    def run(name):
        assert run_ranks(Path(__file__).with_name(name), tmp_path).count("EQUAL") == 2

    return run


@pytest.fixture
def write_file(tmp_path):
    """A function that writes a file of Python below a folder whose name has a space."""

    def write(text, name="mine.py"):
        path = tmp_path / "a folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write
