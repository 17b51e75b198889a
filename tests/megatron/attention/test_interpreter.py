"""The kernels in Triton's interpreter, where this Python has no Triton and .cache/triton has.

test_gpu.py does all of it itself where Triton is installed.
"""

from pathlib import Path

import pytest

from ..interpreter import assert_all_pass, assert_interpreted, only_without_triton

pytestmark = only_without_triton
FILES = [Path(__file__).with_name("test_gpu.py")]
# A case of each kind of scale, and what else is quick.
CASES = "every_scale", "backward", "blocks", "probabilities", "it_says", "a_nan"
SOON = " or ".join(f"test_{case}" for case in CASES)


@pytest.mark.slow
def test_the_kernels_in_the_interpreter(monkeypatch):
    assert_interpreted(monkeypatch, FILES, SOON)


@pytest.mark.heavy
def test_all_cases_and_what_is_compiled_ahead_of_time():
    assert_all_pass(FILES)
