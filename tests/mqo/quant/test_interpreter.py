"""The GPU kernels in Triton's interpreter, where this Python has no Triton and .cache/triton has.

test_gpu.py and test_gpu_hadamard.py do all of it themselves where Triton is installed.
"""

from pathlib import Path

import pytest

from ...interpreter import assert_all_pass, assert_interpreted, only_without_triton

pytestmark = only_without_triton
FILES = [Path(__file__).with_name(name) for name in ("test_gpu.py", "test_gpu_hadamard.py")]
# Of each format one case that is stored, and any tensor of any; squares and short tails among them.
SOON = "test_the_stored_vectors or test_any_tensor or test_a_scalar or test_more_strides"


def test_each_kernel_in_the_interpreter(monkeypatch):
    assert_interpreted(monkeypatch, FILES, SOON)


@pytest.mark.heavy
def test_all_cases_and_what_is_compiled_ahead_of_time():
    assert_all_pass(FILES)
