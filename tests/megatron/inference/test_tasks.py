"""Which tasks there are, and how a model answers them; real ones are in tests/test_evaluation.py.

The model is a table of bigrams, whose answers are computed by hand.
"""

import json
import math
import multiprocessing
from argparse import Namespace
from itertools import pairwise

import pytest
import torch
from megatron.inference.load_model import SavedError

pytest.importorskip("lm_eval", reason="python tests/get_packages.py")
from lm_eval.api.instance import Instance
from lm_eval.models.utils import normalize_gen_kwargs
from megatron.inference.tasks import registry
from megatron.inference.tasks.model import HarnessModel
from megatron.inference.tasks.scores import evaluate

TOKENS = "\0 abcdefgh"  # a character each; the first ends a document, and rows of padding follow
ROWS, WINDOW, END = 12, 4, 0
ROWS_OF = [
    {"question": "ab", "options": ["c", "de"], "answer": 0},
    {"question": "ga", "options": ["h", "a"], "answer": 1},
    {"question": "ca", "options": ["b", "f"], "answer": 0},
]


class Characters:
    vocab_size, eod = len(TOKENS), END

    def tokenize(self, text):
        return [TOKENS.index(letter) for letter in text]

    def detokenize(self, ids):
        return "".join(TOKENS[n] for n in ids)


class Bigrams:
    """A table of logits [token, next token]; `seen` are the shapes of what it got."""

    mqo_watched = True

    def __init__(self):
        self.table = torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(3))
        self.table[:, len(TOKENS) :] = 9.0  # what padding says is never the likeliest token
        self.seen = []

    def __call__(self, tokens, positions, mask, inference_context=None):
        assert torch.equal(positions[0], torch.arange(tokens.size(1)))
        self.seen.append(tuple(tokens.shape))
        return self.table[tokens]

    def log_likelihood(self, ids):
        return sum(self.table[a].double().log_softmax(-1)[b].item() for a, b in pairwise(ids))

    def likeliest(self, token):
        return int(self.table[token, : len(TOKENS)].argmax())


@pytest.fixture
def bigrams():
    return Bigrams()


@pytest.fixture
def told():
    """What was told of the progress."""
    return []


@pytest.fixture
def saved(bigrams, told):
    args = Namespace(seq_length=WINDOW, micro_batch_size=2)
    return HarnessModel(bigrams, args, Characters(), lambda *advance: told.append(advance))


def ask(*args):
    return Instance("loglikelihood", {}, args, 0)


def close(value):
    """Its float32 losses are summed in double precision."""
    return pytest.approx(value, rel=1e-6)


def test_answers_are_as_likely_as_by_hand_and_in_the_order_of_the_questions(saved, bigrams, told):
    asked = [("abc", "de"), ("", "fgh"), ("a", "b"), ("b", "c"), ("h", "ab")]
    found = saved.loglikelihood([ask(*pair) for pair in asked], disable_tqdm=True)
    for (before, scored), (value, _) in zip(asked, found, strict=True):
        ids = Characters().tokenize((before or "\0")[-1] + scored)
        assert value == close(bigrams.log_likelihood(ids))
    # Two at a time of one length, the shortest first; nothing is padded.
    assert bigrams.seen == [(2, 1), (1, 2), (1, 3), (1, 4)]
    assert told[-1] == ("tokens", 11, 11)


def test_an_answer_is_greedy_where_every_token_is_the_likeliest_that_is_one(saved, bigrams):
    best = TOKENS[bigrams.likeliest(TOKENS.index("a"))]
    other = next(letter for letter in TOKENS[2:] if letter != best)
    found = saved.loglikelihood([ask("a", best), ask("a", other)], disable_tqdm=True)
    assert [greedy for _, greedy in found] == [True, False]


def test_what_a_window_has_no_room_for_is_left_out_from_the_first_token_on(saved, bigrams):
    ((value, _),) = saved.loglikelihood([ask("abcdefgh", "ab")], disable_tqdm=True)
    assert bigrams.seen == [(1, WINDOW)]
    assert value == close(bigrams.log_likelihood(Characters().tokenize("hab")))
    with pytest.raises(SavedError, match="5 tokens"):
        saved.loglikelihood([ask("a", "abcde")], disable_tqdm=True)


def test_each_token_of_a_text_is_predicted_once_and_the_first_behind_an_end(saved, bigrams):
    texts = ["abcdefghab", "", "abcd", "h"]
    found = saved.loglikelihood_rolling([ask(text) for text in texts])
    wanted = [bigrams.log_likelihood([END, *Characters().tokenize(text)]) for text in texts]
    assert found == [close(value) for value in wanted]
    assert max(length for _, length in bigrams.seen) == WINDOW


def test_a_text_goes_on_up_to_what_ends_it(saved, bigrams, monkeypatch):
    from megatron.inference.tasks import model

    class Cached:
        def __init__(self, table, args, longest):
            assert longest <= WINDOW
            self.table = table.table

        def __call__(self, ids):
            return self.table[ids[-1]]

    monkeypatch.setattr(model, "started", Cached)
    bigrams.table[:, :] = 0
    for now, after in ("ab", "bc", "cd", "d\0"):
        bigrams.table[TOKENS.index(now), TOKENS.index(after)] = 1.0
    for stops, count, wanted in (([], 2, "bc"), (["c"], 3, "b"), ("d", 3, "bc")):
        asked = ask("ha", {"until": stops, "max_gen_toks": count, "do_sample": False})
        assert saved.generate_until([asked]) == [wanted]
    asked = ask("hhhhhhc", {"until": [], "max_gen_toks": 3})
    assert saved.generate_until([asked]) == ["d"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A function that writes a task of a folder; its data is in there, but for what it names."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS_OF)))

    def write(name, data=None, **rest):
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data or tmp_path / "rows.jsonl")}},
            "output_type": "multiple_choice",
            "test_split": "test",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "options",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "fewshot_delimiter": "",
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task | rest))  # which is YAML, too
        return tmp_path

    return write


def load(names, folder=None, texts=()):
    return registry.load(names, folder, lambda: iter(texts))


def test_the_likeliest_choice_is_the_answer(saved, bigrams, folder):
    loaded = load(["pick"], folder("pick"))
    (row,) = (row for row in evaluate(saved, loaded, None, None) if row["metric"] == "acc")
    right = 0
    for given in ROWS_OF:
        ids = [Characters().tokenize(given["question"][-1] + one) for one in given["options"]]
        values = [bigrams.log_likelihood(one) for one in ids]
        right += values.index(max(values)) == given["answer"]
    assert row["value"] == right / len(ROWS_OF)
    assert (row["documents"], row["shots"], row["filter"]) == (len(ROWS_OF), 0, "none")


def test_the_text_that_was_held_out_is_measured_per_byte_and_word(saved, bigrams):
    texts = ["ab cd", "", "efgh"]
    rows = {
        row["metric"]: row
        for row in evaluate(saved, load(["mqo_heldout"], None, texts), None, None)
    }
    ids = [[END, *Characters().tokenize(text)] for text in texts]
    nats = -sum(map(bigrams.log_likelihood, ids))
    assert rows["bits_per_byte"]["value"] == close(nats / math.log(2) / 9)
    assert rows["byte_perplexity"]["value"] == close(math.exp(nats / 9))
    assert rows["word_perplexity"]["value"] == close(math.exp(nats / 3))
    assert rows["bits_per_byte"]["documents"] == 2
    with pytest.raises(SavedError, match="mqo_heldout"):
        load(["mqo_heldout"], None, [""])


def test_a_standard_error_is_found_without_a_fork_of_this_process(saved, folder, monkeypatch):
    monkeypatch.setattr(multiprocessing, "Pool", None)
    how = {"output_type": "loglikelihood", "doc_to_target": "{{options[0]}}"}
    rows = evaluate(saved, load(["likely"], folder("likely", **how)), None, None)
    assert {row["metric"]: row["stderr"] for row in rows}["perplexity"] > 0


def test_shots_and_a_limit_are_as_asked_unless_the_task_has_no_examples(saved, folder):
    some = {"fewshot_split": "test"}
    place = folder("none", num_fewshot=0, **some)
    place = folder("any", **some)
    loaded = load(["none", "any"], place)
    saved.args.seq_length = 16
    rows = evaluate(saved, loaded, 2, 1)
    assert {(row["task"], row["shots"]) for row in rows} == {("none", 0), ("any", 1)}
    assert {row["documents"] for row in rows} == {2}


@pytest.mark.slow
def test_a_task_that_cannot_be_made_is_refused_and_why(folder, tmp_path, monkeypatch):
    # As mqo.program sets it; else the harness tries the hub for 20 s.
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    place = folder("lacking", data=tmp_path / "nowhere.jsonl")
    with pytest.raises(SavedError, match=r"task lacking .*nowhere\.jsonl"):
        load(["lacking"], place)
    place = folder("elsewhere", dataset_path="some/body", dataset_name="ours", dataset_kwargs={})
    with pytest.raises(SavedError, match=r"some/body ours of the task elsewhere") as error:
        load(["elsewhere"], place)
    assert "datasets.load_dataset('some/body', 'ours')\"" in error.value.facts["help"]
    place = folder("wrong", no_such_key=1)
    with pytest.raises(SavedError, match=r"task wrong .*no_such_key"):
        load(["wrong"], place)


def test_code_of_a_folder_runs_only_for_a_task_that_is_named(folder, tmp_path):
    place, marker = folder("mine"), tmp_path / "marker"
    (place / "code.py").write_text(f"open({str(marker)!r}, 'w')\ndef text(row): return 'a'\n")
    whole = (folder("theirs") / "theirs.yaml").read_text()
    (place / "theirs.yaml").write_text(
        whole.replace('"{{question}}"', "!function code.text").replace("{", "{ ")
    )
    load(["mine"], place)
    assert not marker.exists()
    load(["theirs"], place)
    assert marker.exists()


def test_what_a_model_of_text_is_not_for_is_refused(folder):
    options = {"generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False}}
    text = {"output_type": "generate_until", "doc_to_choice": None, "doc_to_target": "{{answer}}"}
    loaded = load(["long"], folder("long", **text, **options))
    registry.check(loaded["tasks"].values(), 9)
    with pytest.raises(SavedError, match="up to 8 tokens"):
        registry.check(loaded["tasks"].values(), 8)
    options["generation_kwargs"] |= {"do_sample": True, "temperature": 1.0}
    with pytest.raises(SavedError, match="task drawn samples"):
        registry.check(load(["drawn"], folder("drawn", **text, **options))["tasks"].values(), 99)
    with pytest.raises(SavedError, match="task code runs code"):
        registry.check(load(["code"], folder("code", unsafe_code=True))["tasks"].values(), 99)


def test_an_answer_has_as_many_tokens_as_a_task_allows_by_default():
    assert normalize_gen_kwargs({})["max_gen_toks"] == registry.GENERATED


@pytest.mark.slow
def test_an_unknown_task_is_refused_with_names_near_it_and_the_files_that_are_none(folder):
    place = folder("mine")
    with pytest.raises(SavedError, match=r"'hellaswagg'\. .* hellaswag[ ,.].*`lm-eval ls tasks`"):
        load(["mine", "hellaswagg"], place)
    (place / "rubbish.yaml").write_text("task: [")
    with pytest.raises(SavedError, match=r"'rubbish', and .*rubbish\.yaml "):
        load(["rubbish"], place)
    # A name of its own is found where others are not read.
    assert list(load(["mine"], place)["tasks"]) == ["mine"]


@pytest.mark.slow
def test_a_group_has_its_tasks_and_what_they_have_together(saved, folder):
    folder("one")
    place = folder("two")
    both = {"group": "both", "task": ["one", "two"]}
    both["aggregate_metric_list"] = [{"metric": "acc", "weight_by_size": True}]
    (place / "both.yaml").write_text(json.dumps(both))
    rows = evaluate(saved, load(["both"], place), None, None)
    found = {row["task"]: row for row in rows if row["metric"] == "acc"}
    assert {name: row["documents"] for name, row in found.items()} == {
        "one": 3,
        "two": 3,
        "both": 6,
    }
    assert len({row["value"] for row in found.values()}) == 1
    json.dumps(rows)
