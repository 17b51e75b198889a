"""How tokens are drawn; real texts are in tests/test_evaluation.py."""

from argparse import Namespace

import pytest
import torch
from megatron.inference import generation

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0])


def drawn(choice, seed=0, count=200):
    draw = torch.Generator().manual_seed(seed)
    return [generation.pick(LOGITS, choice, draw) for _ in range(count)]


def test_temperature_0_takes_the_likeliest_and_draws_nothing():
    draw = torch.Generator().manual_seed(3)
    before = draw.get_state()
    assert generation.pick(LOGITS, generation.Choice(), draw) == 1
    assert torch.equal(draw.get_state(), before)


def test_top_k_and_top_p_leave_tokens_out():
    assert set(drawn(generation.Choice(temperature=5.0))) == {0, 1, 2, 3}
    assert set(drawn(generation.Choice(temperature=5.0, top_k=2))) == {1, 2}
    # softmax(LOGITS) is 0.09, 0.66, 0.24, 0.01: two tokens reach 0.8.
    assert set(drawn(generation.Choice(temperature=1.0, top_p=0.8))) == {1, 2}
    assert set(drawn(generation.Choice(temperature=1.0, top_p=0.0))) == {1}
    assert set(drawn(generation.Choice(temperature=5.0, top_k=99))) == {0, 1, 2, 3}


def test_a_seed_decides_what_is_drawn():
    choice = generation.Choice(temperature=2.0)
    assert drawn(choice, seed=1) == drawn(choice, seed=1)
    assert drawn(choice, seed=1) != drawn(choice, seed=2)


def test_shares_are_those_of_the_softmax():
    found = drawn(generation.Choice(temperature=1.0), count=4000)
    # Four standard deviations of a share of 4000 draws are at most 0.032.
    shares = torch.bincount(torch.tensor(found), minlength=4) / 4000
    assert torch.allclose(shares, LOGITS.softmax(0), atol=0.032)


def test_padding_rows_are_never_taken_and_each_token_goes_in_once():
    fed = []

    def model(ids):
        fed.append(ids)
        return torch.tensor([0.0, 1.0, 0.5, 9.0])

    draw = torch.Generator()
    found = list(generation.generate_tokens(model, [5, 6], 3, 3, 0, generation.Choice(), draw))
    assert found == [1, 1, 1]
    assert fed == [[5, 6], [1], [1]]


def test_a_text_ends_before_the_end_of_its_document():
    chosen = iter([4, 5, 0, 6])
    model = lambda ids: torch.eye(8)[next(chosen)]  # noqa: E731
    found = generation.generate_tokens(model, [1], 9, 8, 0, generation.Choice(), torch.Generator())
    assert list(found) == [4, 5]


@pytest.mark.parametrize(
    ("pattern", "use_cache", "cached"),
    [
        (None, True, True),
        (None, False, False),
        ("*-*-", True, True),
        ("M-*-", True, False),  # the states of its Mamba layers would be lost
    ],
)
def test_only_keys_and_values_are_cached(pattern, use_cache, cached):
    args = Namespace(hybrid_layer_pattern=pattern)
    model = generation.started(None, args, 8, use_cache=use_cache)
    assert isinstance(model, generation.Cached) is cached
