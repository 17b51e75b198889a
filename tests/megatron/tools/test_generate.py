"""How generate.py draws tokens; real texts are in tests/test_evaluation.py."""

from argparse import Namespace

import pytest

torch = pytest.importorskip("torch")
LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0])


@pytest.fixture(scope="module")
def program(load_program):
    return load_program("generate")


def drawn(program, choice, seed=0, count=200):
    draw = torch.Generator().manual_seed(seed)
    return [program.pick(LOGITS, choice, draw) for _ in range(count)]


def test_temperature_0_takes_the_likeliest_and_draws_nothing(program):
    draw = torch.Generator().manual_seed(3)
    before = draw.get_state()
    assert program.pick(LOGITS, program.Choice(), draw) == 1
    assert torch.equal(draw.get_state(), before)


def test_top_k_and_top_p_leave_tokens_out(program):
    assert set(drawn(program, program.Choice(temperature=5.0))) == {0, 1, 2, 3}
    assert set(drawn(program, program.Choice(temperature=5.0, top_k=2))) == {1, 2}
    # softmax(LOGITS) is 0.09, 0.66, 0.24, 0.01: two tokens reach 0.8.
    assert set(drawn(program, program.Choice(temperature=1.0, top_p=0.8))) == {1, 2}
    assert set(drawn(program, program.Choice(temperature=1.0, top_p=0.0))) == {1}
    assert set(drawn(program, program.Choice(temperature=5.0, top_k=99))) == {0, 1, 2, 3}


def test_a_seed_decides_what_is_drawn(program):
    choice = program.Choice(temperature=2.0)
    assert drawn(program, choice, seed=1) == drawn(program, choice, seed=1)
    assert drawn(program, choice, seed=1) != drawn(program, choice, seed=2)


def test_shares_are_those_of_the_softmax(program):
    found = drawn(program, program.Choice(temperature=1.0), count=4000)
    # Four standard deviations of a share of 4000 draws are at most 0.032.
    shares = torch.bincount(torch.tensor(found), minlength=4) / 4000
    assert torch.allclose(shares, LOGITS.softmax(0), atol=0.032)


def test_padding_rows_are_never_taken_and_each_token_goes_in_once(program):
    fed = []

    def model(ids):
        fed.append(ids)
        return torch.tensor([0.0, 1.0, 0.5, 9.0])

    draw = torch.Generator()
    found = list(program.generate_tokens(model, [5, 6], 3, 3, 0, program.Choice(), draw))
    assert found == [1, 1, 1]
    assert fed == [[5, 6], [1], [1]]


def test_a_text_ends_before_the_end_of_its_document(program):
    chosen = iter([4, 5, 0, 6])
    model = lambda ids: torch.eye(8)[next(chosen)]  # noqa: E731
    found = program.generate_tokens(model, [1], 9, 8, 0, program.Choice(), torch.Generator())
    assert list(found) == [4, 5]


def test_a_prompt_must_be_one_and_leave_room(program):
    from megatron.inference.load_model import SavedError

    args = Namespace(max_position_embeddings=8)
    program.check_length(args, "abc", [1, 2, 3], 5)
    with pytest.raises(SavedError, match="3 tokens and 6 more are 9"):
        program.check_length(args, "abc", [1, 2, 3], 6)
    with pytest.raises(SavedError, match="holds no token"):
        program.check_length(args, "", [], 1)
