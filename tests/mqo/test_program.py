"""Programs of a tree, started by `mqo`: small ones of our own."""

import os

import pytest
from mqo.errors import DataError, RunError
from mqo.program import Advance, ask, at_once, call


@pytest.fixture
def program(tmp_path):
    """A function that writes a program and gives its path."""

    def write(text):
        path = tmp_path / "tools/one.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import json, os, sys\nfrom pathlib import Path\n{text}")
        return path

    return write


def test_it_gets_its_words_and_variables_and_none_of_a_run(program, monkeypatch):
    monkeypatch.setenv("MQO_QUANT_CONFIG", "a run's")
    monkeypatch.setenv("PYTHONPATH", "a place that nothing is to come from")
    text = "Path(sys.argv[2]).write_text(json.dumps([sys.argv[1], sys.path, dict(os.environ)]))"
    word, path, variables = ask(program(text), ["a word"], variables={"OURS": "1"})
    assert word == "a word"
    assert "a place that nothing is to come from" not in path
    assert "MQO_QUANT_CONFIG" not in variables
    assert (variables["OURS"], variables["HF_HUB_OFFLINE"]) == ("1", "1")


def test_what_it_says_of_a_failure_is_raised_as_the_error_that_was_named(program):
    said = '{"found": "2 tensors are missing", "expected": "9", "help": ""}'
    text = f"Path(os.environ['MQO_FAILURE']).write_text('{said}')\nsys.exit('out of luck')"
    with pytest.raises(DataError, match=r"2 tensors are missing\. Expected: 9\."):
        ask(program(text), [], error=DataError)


def test_another_failure_is_told_by_its_last_words(program):
    with pytest.raises(RunError, match=r"tools/one\.py .*exit code 1: out of luck") as left:
        ask(program("sys.exit('first\\nout of luck')"), [], help="Try again")
    assert "Try again" in str(left.value)
    assert left.value.detail == "first\nout of luck\n"
    with pytest.raises(RunError, match="exit code 3: it printed nothing"):
        ask(program("sys.exit(3)"), [])


def test_one_that_hangs_is_ended(program):
    with pytest.raises(RunError, match=r" 0\.01 s"):
        ask(program("sys.stdin.read(), __import__('time').sleep(60)"), [], limit_s=0.01)


def test_it_tells_how_far_it_is_and_a_half_written_file_does_not_count(program):
    """It waits until the first state was seen, with a file that the watcher makes."""
    text = """
place, seen = Path(os.environ["MQO_PROGRESS"]), Path(os.environ["SEEN"])
place.write_text('{"what": "tok')
place.write_text(json.dumps({"what": "tokens", "done": 3, "total": 9}))
while not seen.exists():
    os.sched_yield()
Path(sys.argv[1]).write_text("0")
"""
    path, told = program(text), []
    seen = path.with_name("seen")

    def watch(advance):
        told.append(advance)
        seen.touch()

    ask(path, [], variables={"SEEN": str(seen)}, watch=watch)
    assert told[0] == Advance("tokens", 3, 9)


def test_a_program_that_ends_without_its_result_is_named(program):
    with pytest.raises(RunError, match=r"tools/one\.py ended without a result"):
        ask(program("sys.exit(0)"), [])


def test_a_function_gets_a_request_in_the_types_of_its_parameters(program, tmp_path):
    path = program("def put(at: Path, *, n: int = 1): return [at.name, type(n).__name__]")
    assert call(path, "put", {"at": tmp_path / "one", "n": "3"}) == ["one", "int"]


def test_a_correctable_error_of_a_function_is_the_error_that_was_named(program):
    text = """
class CheckpointError(RuntimeError):
    pass

def fail(kind: str):
    raise CheckpointError("the index is damaged") if kind == "known" else KeyError("a bug")
"""
    with pytest.raises(DataError, match=r"^the index is damaged\.$"):
        call(program(text), "fail", {"kind": "known"}, error=DataError)
    with pytest.raises(RunError, match=r"tools/one\.py ended with exit code 1: KeyError: 'a bug'"):
        call(program(text), "fail", {"kind": "other"}, error=DataError)


@pytest.mark.parametrize(
    "text",
    [
        "def other(): ...",
        "def put(): ...",
        "def put(at: int): ...",
        "class Words: ...\ndef put(at: Words): ...",
    ],
)
def test_a_program_of_another_version_is_refused(program, text):
    with pytest.raises(
        DataError, match=r"one\.py is a program of another version of mqo"
    ) as refused:
        call(program(text), "put", {"at": "a word"}, error=DataError)
    assert "mqo apply --tree" in refused.value.help


def test_an_argument_that_a_function_itself_refuses_is_no_other_version(program):
    text = """
from pydantic import TypeAdapter

def put(at: str):
    TypeAdapter(int).validate_python(at)
"""
    with pytest.raises(RunError, match=r"ended with exit code 1"):
        call(program(text), "put", {"at": "a word"}, error=DataError)


def test_an_error_in_one_thread_ends_the_programs_of_the_others(program, tmp_path):
    path = program("import signal\nopen(os.environ['PIPE'], 'w').close()\nsignal.pause()")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def work(number):
        if number:
            return ask(path, [], variables={"PIPE": str(pipe)})
        pipe.open().close()  # the program of the other thread runs
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        at_once(work, range(2), threads=2)


def test_results_of_threads_are_in_order_and_programs_run_at_once(program, tmp_path):
    path = program(
        "open(os.environ['PIPE'], sys.argv[1]).close()\nopen(sys.argv[2], 'w').write('1')"
    )
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # each end waits for the other
    variables = {"PIPE": str(pipe)}
    results = at_once(lambda way: ask(path, [way], variables=variables), "rw", threads=2)
    assert results == [1, 1]
