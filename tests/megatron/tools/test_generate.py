"""What generate.py refuses; how tokens are drawn is in test_generation.py of the library."""

from argparse import Namespace

import pytest

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def program(load_program):
    return load_program("generate")


def test_a_prompt_must_be_one_and_leave_room(program):
    from megatron.inference.load_model import SavedError

    args = Namespace(max_position_embeddings=8)
    program.check_length(args, "abc", [1, 2, 3], 5)
    with pytest.raises(SavedError, match=r"3 tokens.* 6 .* 9 .*--tokens"):
        program.check_length(args, "abc", [1, 2, 3], 6)
    with pytest.raises(SavedError, match="prompt ''"):
        program.check_length(args, "", [], 1)
