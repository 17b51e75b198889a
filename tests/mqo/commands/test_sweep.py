"""`mqo sweep` as a command, its jobs programs of our own and nothing prepared."""

import sys

import pytest
from mqo.commands import sweep as sweeps
from mqo.launch import machine
from mqo.project import Project
from mqo.quant.plugins import PLUGINS
from mqo.sweep import local, pool
from mqo.sweep.state import SweepFolder

from ..sweep.conftest import program

TWO = ("--models", "llama32-1b", "--datasets", "wikipedia", "--modes", "bf16,FA_mxfp8")


@pytest.fixture
def mqo(tmp_path, monkeypatch, command_line):
    """A function that runs `mqo sweep`: its exit code, its output and its errors."""
    monkeypatch.setattr(Project, "runs", tmp_path / "runs")
    monkeypatch.setattr(machine, "detect", lambda: machine.Machine(2, 0))
    monkeypatch.setattr(sweeps, "prepare", lambda project, asked: print("prepared"))

    monkeypatch.setattr(pool, "POLL_S", 0.02)

    def run(*words, body=""):
        job = [sys.executable, "-c", program(body)]
        monkeypatch.setattr(local, "command", lambda run, *rest: [*job, str(run.root)])
        return command_line("sweep", *words)

    return run


def test_a_sweep_and_the_same_command_again(mqo, tmp_path):
    code, out, err = mqo(*TWO)
    assert (code, err) == (0, "")
    assert out.endswith("2 of 2 done\n")
    assert max(map(len, out.partition("\nrun ")[2].splitlines())) <= 80
    (folder,) = (tmp_path / "runs" / "sweeps").iterdir()
    assert {entry.state for entry in SweepFolder(folder).read()} == {"done"}
    assert folder.name.startswith("tiny_")
    code, out, _ = mqo(*TWO, body="sys.exit(1)")
    assert code == 0
    assert "2 of 2 runs are done already and skipped" in out
    assert "prepared" not in out
    mqo(*TWO, "--", "--lr", "1")
    assert len(list((tmp_path / "runs" / "sweeps").iterdir())) == 2


def test_several_values_have_commas_or_are_repeated_under_either_name(mqo, tmp_path):
    for words in (
        "--model llama32-1b --dataset wikipedia --mode bf16,FA_mxfp8 --seed 1 --seed 2",
        "--models=llama32-1b --datasets wikipedia --modes bf16 --mode FA_mxfp8 --seeds=1,2",
    ):
        code, out, _ = mqo(*words.split())
        assert code == 0 and out.endswith("4 of 4 done\n")
    assert "4 of 4 runs are done already" in out


def test_the_class_of_the_models_is_part_of_their_names(mqo):
    words = "--model llama32-1b --dataset wikipedia --mode bf16 --model-class hybrid"
    code, out, _ = mqo(*words.split())
    assert code == 0
    assert "llama32-1b-hybrid" in out


def test_the_help_has_one_name_of_an_option(mqo):
    _, out, _ = mqo("--help")
    assert "--mode " in out and "--modes" not in out


@pytest.mark.parametrize(
    "name", ["--model", "--mode", "--dataset", "--models", "--recipe", "--seed"]
)
def test_an_empty_name_is_not_all_names(mqo, name):
    assert mqo(name, "")[0] == 2


def test_a_failed_run_is_the_exit_code_and_is_told_at_the_end(mqo, tmp_path):
    body = 'if mode == "bf16": sys.exit("mqo: out of steps")'
    code, out, _ = mqo(*TWO, "-o", tmp_path / "mine", body=body)
    assert code == 1
    *_, failed, folder, counts = out.splitlines()
    assert counts == "1 of 2 done, 1 failed"
    name = "llama32-1b_wikipedia_bf16"
    assert failed == f"failed   : {name}: out of steps"
    assert folder.strip() == f"{tmp_path}/mine/{name}_2"


def test_a_long_reason_of_a_failed_run_fits_in_80_columns(mqo, tmp_path):
    body = f'if mode == "bf16": sys.exit("mqo: {"out of steps " * 20}")'
    _, out, _ = mqo(*TWO, "-o", tmp_path / "mine", body=body)
    lines = out[out.index("failed   :") :].splitlines()[:-2]  # without the folder and the counts
    assert len(lines) > 2 and max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--models", "gpt"), "'gpt'"),
        (("--modes", "int3*"), "'int3*'"),
        (("--training-config", "big"), "'big'"),
        (("--gemms", "wgrad"), "'wgrad'"),
        (("--attention-gemms", "dq"), "'dq'"),
        (("--dtype", "fp8"), "'fp8'"),
        (("--model-class", "bert"), "'bert'"),
        (("--seeds", "1,x"), "'x'"),
        (("--training-config", "fast"), "No data was given for wikipedia"),
        (("--jobs", "3"), "at most 2 jobs"),
        (("--slurm", "gpu"), "KEY=VALUE"),
        (("--tracker", "comet"), "'comet'"),
    ],
)
def test_what_is_refused_leaves_nothing_to_run(mqo, words, text):
    code, out, err = mqo(*TWO, *words)
    assert (code, out) == (2, "")
    assert text in err


def test_a_folder_of_another_sweep_is_refused_before_anything_is_prepared(mqo, tmp_path):
    mqo(*TWO, "-o", tmp_path)
    code, out, err = mqo(*TWO, "-o", tmp_path, "--", "--lr", "1")
    assert code == 2
    assert "prepared" not in out
    assert "with other settings" in err


def test_an_index_is_of_one_dataset(mqo, tmp_path):
    words = ("--datasets", "all", "--tokenizer", tmp_path, "--data-prefix", tmp_path / "x")
    code, _, err = mqo("--models", "llama32-1b", *words)
    assert code == 2
    assert "--data-prefix" in err


def test_products_of_attentions_backward_pass_make_other_runs(mqo, tmp_path):
    words = ("--models", "llama32-1b", "--datasets", "wikipedia", "--modes", "qk_mxfp8")
    assert mqo(*words)[0] == mqo(*words, "--attention-gemms", "all")[0] == 0
    assert len({*(tmp_path / "runs/sweeps").iterdir()}) == 2


def test_layers_to_exclude_make_other_runs(mqo, tmp_path):
    for layers in ("output_layer", "qk:*.0.*"):
        code, out, _ = mqo(*TWO, "--exclude", layers)
        assert code == 0
        assert "skipped" not in out
    assert len(list((tmp_path / "runs" / "sweeps").iterdir())) == 2
    code, _, err = mqo(*TWO, "--exclude", "qv:*.0.*")
    assert code == 2
    assert "'qv'" in err


def test_a_sweep_of_quantizers_of_the_user(mqo, tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(
        '@quantizer("mine", options={"bits": 3})\ndef mine(x, context):\n    return x\n'
    )
    words = (*TWO[:-1], "bf16,FA_mine", "--axis", "mine.bits=3,4", "-o", tmp_path / "sweep")
    code, out, err = mqo(*words, "--plugin", file)
    assert (code, err) == (0, "")
    assert out.endswith("3 of 3 done\n")
    monkeypatch.chdir(tmp_path)
    code, out, _ = mqo(*words, "--plugin", "mine.py")
    assert code == 0
    assert "3 of 3 runs are done already and skipped" in out
    code, out, err = mqo(*words, "--plugin", "mine.py", "--plugin-option", "mine.bits=4")
    assert (code, out) == (2, "")
    assert "mine.bits" in err
    PLUGINS.clear()
