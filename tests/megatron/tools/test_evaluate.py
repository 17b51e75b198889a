"""How evaluate.py cuts a text into windows; real losses are in tests/test_evaluation.py."""

from argparse import Namespace
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def program(load_program):
    return load_program("evaluate")


def ones(model, batch):
    """Losses of 1."""
    return torch.ones(len(batch), len(batch[0]) - 1)


def test_every_token_but_the_first_is_predicted_once(program):
    for length in (2, 5, 8, 9, 10, 33):
        found = list(program.windows(range(length), 4))
        assert [token for window in found for token in window[1:]] == list(range(1, length))
        assert {len(window) for window in found[:-1]} <= {5}
        assert all(a[-1] == b[0] for a, b in pairwise(found))
    assert list(program.windows([], 4)) == list(program.windows([7], 4)) == []


def test_a_batch_holds_rows_of_one_length():
    from megatron.inference.load_model import batches

    rows = [[0] * 5] * 5 + [[0] * 3]
    sizes = [[len(row) for row in batch] for batch in batches(rows, 2)]
    assert sizes == [[5, 5], [5, 5], [5], [3]]
    assert list(batches([], 2)) == []


def test_a_limit_is_of_predicted_tokens_and_reads_no_further(program):
    read = []

    def documents():
        for document in ([1, 2, 3], [4, 5], [6, 7]):
            read.append(document)
            yield document

    args = Namespace(padded_vocab_size=8)
    assert list(program.ids_of(args, program.Text("a text", documents()), 4)) == [1, 2, 3, 4, 5]
    assert len(read) == 2
    everything = program.Text("a text", documents())
    assert list(program.ids_of(args, everything, None)) == [1, 2, 3, 4, 5, 6, 7]


def test_a_token_that_the_model_does_not_have_is_named(program):
    from megatron.inference.load_model import SavedError

    args = Namespace(padded_vocab_size=4)
    with pytest.raises(SavedError) as error:
        list(program.ids_of(args, program.Text("a text", [[1, 5]]), None))
    assert str(error.value) == (
        "a text has the token 5, but the model's last token is 3. "
        "Expected: the vocabulary that the model was trained with."
    )


def test_a_text_shorter_than_a_window_is_refused(program, monkeypatch):
    from megatron.inference import load_model

    torch = pytest.importorskip("torch")
    model = Namespace(mqo_watched=True)
    monkeypatch.setattr(
        program.load_model, "token_losses", lambda m, b: torch.ones(len(b), len(b[0]) - 1)
    )
    args = Namespace(padded_vocab_size=100, seq_length=8, micro_batch_size=2)
    with pytest.raises(load_model.SavedError, match="a text holds 5 tokens") as caught:
        program.measured(model, args, program.Text("a text", [range(5)]), None)
    assert caught.value.facts["expected"].startswith("at least 9")
    # As few as were asked for will do.
    assert program.measured(model, args, program.Text("a text", [range(5)]), 4) == (4.0, 4)
    assert program.measured(model, args, program.Text("a text", [range(30)]), None) == (29.0, 29)


def test_what_is_held_out_is_the_validation_split(program):
    from megatron.inference.load_model import SavedError

    names = ("data_path", "data_args_path", "train_data_path", "valid_data_path")
    names += ("test_data_path", "per_split_data_args_path")
    args = Namespace(**dict.fromkeys(names), split="80,20,0")
    args.data_path = ["one"]
    prefixes, share = program.held_out(args)
    assert (prefixes, share) == (["one"], pytest.approx((0.8, 1.0)))
    args.split = "100,0,0"
    with pytest.raises(SavedError, match=r"no validation split.*--data"):
        program.held_out(args)
    args.data_path, args.train_data_path, args.valid_data_path = None, ["a"], ["b"]
    assert program.held_out(args) == (["b"], (0.0, 1.0))


def test_what_is_to_be_predicted_is_known_before_and_told_batch_by_batch(program, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(
        program.load_model, "token_losses", lambda m, b: torch.ones(len(b), len(b[0]) - 1)
    )
    args = Namespace(padded_vocab_size=100, seq_length=4, micro_batch_size=2)
    part, told = program.Text("a text", [range(30)], 30), []
    assert (part.predicted(None), part.predicted(10)) == (29, 10)
    program.measured(Namespace(mqo_watched=True), args, part, None, told.append)
    assert told == [8, 16, 24, 28, 29]


def test_documents_are_text_without_their_ends_and_no_more_are_read(program, monkeypatch):
    from megatron.inference.load_model import SavedError

    read = []

    def documents():
        for document in ([1, 2, 0], [3], [9], [1]):
            read.append(document)
            yield document

    monkeypatch.setattr(program, "chosen_texts", lambda *_: [program.Text("a text", documents())])
    tokenizer = Namespace(eod=0, detokenize=lambda ids: "".join(map(str, ids)))
    args, choice = Namespace(padded_vocab_size=4), program.Choice()
    assert list(program.documents(args, choice, 2, tokenizer)) == ["12", "3"]
    assert len(read) == 2
    with pytest.raises(SavedError, match="a text has the token 9"):
        list(program.documents(args, choice, None, tokenizer))
