"""train_config.py's command line: what it accepts, what it refuses, and what it shows."""

import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import nullcontext

import pytest
from mqo.commands import train_config
from mqo.errors import (
    DataError,
    EditedError,
    LayoutError,
    MissingError,
    MqoError,
    OverlayError,
    RunError,
    UnknownNameError,
)
from mqo.launch import arguments, preview, run
from mqo.launch.checkpoint_lock import locked
from mqo.launch.config import Cluster
from mqo.launch.effects import NoEffectError
from mqo.launch.machine import detect
from mqo.launch.plan import plan_layout
from mqo.launch.prepare import check_tree
from mqo.launch.upstream_flags import FlagError
from mqo.matrix.layer_pattern import PatternError
from mqo.project import Project
from mqo.quant import formats

DOCUMENTED = ("mxfp8", "mxfp4", "hifp8")  # the types of the modes with scripts
NAMES = ["--model", "llama32-1b", "--dataset", "wikipedia", "--quantization", "FA_linear_mxfp8"]


def cell(*words, names=NAMES, front_end=False):
    own, extra = arguments.split_flags([*names, "--training-config", "smoke", *words])
    return arguments.config_from(arguments.parser(front_end).parse_intermixed_args(own), extra)


@pytest.mark.parametrize("front_end", [False, True])
def test_a_patch_is_left_out_by_either_spelling(front_end):
    mode = ("--fa-quantization", "bf16") if front_end else ("--quantization", "bf16")
    names = ("--model", "llama32-1b", "--dataset", "wikipedia", *mode)
    words = ("--without-patch", "quant_sites", "--without", "run_hooks", "--without", "quant_sites")
    config = cell(*words, names=names, front_end=front_end)
    assert set(config.placement.without) == {"quant_sites", "run_hooks"}
    assert len(config.placement.without) == 2


def types(made):
    return " ".join(made.quantization.types.values())


def test_flags_behind_two_dashes_are_megatrons():
    assert cell("--", "--seed", "7", "--", "x").experiment.extra_flags == ("--seed", "7", "--", "x")
    assert cell().experiment.extra_flags == ()


def test_the_five_documented_arguments_may_stand_between_options():
    made = cell("ck pt", "tb", "--gemms", "all", "tok", "data", "bf16")
    assert (str(made.experiment.checkpoint), str(made.recording.tensorboard)) == ("ck pt", "tb")
    assert (str(made.experiment.tokenizer), str(made.experiment.data_prefix)) == ("tok", "data")
    assert made.experiment.dtype == "bf16"
    assert made.quantization.types["wgrad"] == "mxfp8"


@pytest.mark.parametrize(
    "words",
    [
        *([*["path"] * given, ""] for given in range(4)),
        *([name, ""] for name in ("--runs", "--teacher", "--plugin", "--megatron")),
    ],
)
def test_an_empty_path_is_refused(words):
    with pytest.raises(MqoError, match="path is empty"):
        cell(*words)


def test_the_dtype_is_the_configurations_unless_given():
    assert cell().experiment.dtype == "fp32"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "gpt"], "'gpt'.*llama31-8b, llama32-1b"),
        (["--dataset", "c4"], "'c4'.*dolma, wikipedia"),
        (["--quantization", "int8"], "'int8'.*FA_T.*hifp8"),
        (["--training-config", "big"], "'big'.*fast, smoke, sta"),
        (["--gemms", "none"], "'none'.*all, fprop"),
        (["--attention-gemms", "none"], "'none'.*all, forward"),
        (["a", "b", "c", "d", "int8"], "'int8'.*bf16, fp16, fp32"),
    ],
)
def test_an_unknown_name_lists_the_valid_ones(words, message):
    with pytest.raises(UnknownNameError, match=message):
        cell(*words)


@pytest.mark.parametrize(("there", "kept"), [(0, 3), (3, 3), (4, 3), (5, 0)])
def test_the_default_of_standard_removes_no_checkpoint_that_it_finds(there, kept, tmp_path):
    for iteration in range(there):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    words = (str(tmp_path), "--training-config", "standard")
    assert cell(*words).recording.options.get("keep_checkpoints", 0) == kept
    assert cell(*words, "--keep-last", "2").recording.options == {"keep_checkpoints": 2}


def test_the_mode_has_two_names():
    assert cell("--mode", "mxfp4", names=NAMES[:4]) == cell("--quantization", "mxfp4")


def test_a_missing_name_says_how_to_see_them_all():
    args = arguments.parser().parse_args(["--model", "llama32-1b"])
    with pytest.raises(MqoError, match=r"--dataset.*--list"):
        arguments.config_from(args, [])


def test_a_flag_of_megatrons_in_the_wrong_place_is_told_its_own():
    for flag in ("--seq-length", "--mod"):  # no abbreviation: Megatron has a thousand flags
        with pytest.raises(MqoError, match=rf"{flag}.* `?--`?"):
            cell(flag, "7")


def test_a_mistyped_option_has_one_suggestion():
    for typed, meant in (("--modell", "--model"), ("--quantizaton=x", "--quantization")):
        with pytest.raises(MqoError, match=rf"Did you mean {meant}\? ") as error:
            cell(typed, "7")
        assert str(error.value).count("Did you mean") == 1


def test_the_version_is_the_one_of_mqo(monkeypatch, capsys):
    monkeypatch.setattr(train_config.sys, "argv", ["train_config.py", "--version"])
    train_config.main()
    assert capsys.readouterr().out == f"{Project.here().version()}\n"


def test_the_listing_names_everything():
    text, _, rest = arguments.listing().partition("recipes:\n")
    documented = [f"{name}_{kind}" for name in ("FA", "linear", "FA_linear") for kind in DOCUMENTED]
    assert "all three):\n" + "".join(f"  {n}\n" for n in ("bf16", *documented)) + "\n" in text
    assert "  mxfp4-backward\n" in rest
    text += rest.partition("training configs:\n")[2]
    names = ("llama32-1b", "llama31-8b", "wikipedia", "dolma", "bf16", "FA_linear_T", "T", "smoke")
    for name in (*names, *formats.FORMATS):
        assert text.count(f"  {name}\n") == 1


@pytest.mark.parametrize("front_end", [False, True])
def test_the_help_names_modes_by_pattern_and_each_type_once(front_end):
    said = " ".join(arguments.parser(front_end).format_help().split())
    modes = "qk_T, pv_T, qk_pv_T" if front_end else "FA_T, linear_T, FA_linear_T, T, qk_T"
    assert modes in said
    listed = said.partition("T is one of ")[2].partition(".")[0].split(", ")
    assert listed == list(formats.FORMATS)
    assert len(re.findall(r"\bnvfp4\b", said)) == 1


def test_types_of_one_kind_of_layer_change_the_mode():
    made = cell("--attention-quantization", "qk_pv_hifp8", "--linear-quantization", "mxfp4")
    assert types(made) == "mxfp4 none none hifp8 hifp8"
    assert made.title == "llama32-1b_wikipedia_linear_mxfp4_qk_hifp8_pv_hifp8_smoke"
    assert (
        cell("--attention-quantization", "none", "--gemms", "all").quantization.mode
        == "linear_mxfp8"
    )


def test_types_alone_need_no_mode():
    made = cell("--linear-quantization", "hifp8", names=NAMES[:4])
    assert made.quantization.mode == "linear_hifp8"
    assert types(made) == "hifp8 none none none none"


def test_the_types_in_the_tree_cannot_be_changed_by_an_option():
    source = ["--quantization", "source"]
    assert (cell(*source).quantization.types, cell(*source).quantization.mode) == (None, "source")
    with pytest.raises(MqoError, match="quant_type_modifier"):
        cell(*source, "--linear-quantization", "mxfp8")


def test_the_front_end_for_attention_quantizes_attention_alone():
    made = cell("--fa-quantization", "qk_pv_mxfp4", names=NAMES[:4], front_end=True)
    assert types(made) == "none none none mxfp4 mxfp4"
    assert (
        cell("--fa-quantization", "bf16", names=NAMES[:4], front_end=True).quantization.mode
        == "bf16"
    )
    with pytest.raises(UnknownNameError, match=r"'FA_mxfp8'.*bf16.*qk_pv_T"):
        cell("--fa-quantization", "FA_mxfp8", names=NAMES[:4], front_end=True)
    with pytest.raises(MqoError, match="--fa-quantization"):
        cell(names=NAMES[:4], front_end=True)
    text = arguments.listing(front_end=True)
    assert "  pv_T\n" in text
    assert "linear" not in text


# -- dry runs --------------------------------------------------------------------------------------


def shown(project, made):
    """What a dry run on this machine shows of a run without a checkpoint."""
    machine, tree = detect(), preview._tree(project, made)
    types = made.quantization.types or (preview.types_of(tree) if tree else {})
    config, lines = plan_layout(project.tree, made, machine, types)
    return preview.preview_text(project, config, machine, types, lines)


def test_a_dry_run_shows_types_and_command_and_touches_nothing(tmp_path):
    project = Project(tmp_path)
    text = shown(project, cell("--", "--seed", "7"))
    assert "# source: qk = mxfp8" in text
    assert f"# source: {project.tree} " in text
    assert "--hidden-size 256" in text
    assert "--seed 7" in text
    assert not list(tmp_path.iterdir())


def test_a_dry_run_shows_the_lines_that_the_source_would_change(vendored, monkeypatch):
    project = Project(vendored.root.parent)
    lines = shown(project, cell()).splitlines()
    assert lines.count("# +        custom_quant_type = 'mxfp8'") == 2
    assert [line for line in lines if line.startswith("# -  ")] == [
        "# -        custom_quant_type = 'none'"
    ] * 2
    text = shown(project, cell("--quantization", "source"))
    assert f"# source: identical to {project.tree}\n" in text


def test_a_dry_run_is_shell_that_starts_the_very_command(tmp_path):
    text = shown(Project(tmp_path / "a b"), cell("--", "--seed", "7"))
    # Quoted where the checkout's own path has a space.
    python = shlex.quote(sys.executable)
    command = text[text.index("MQO_QUANT_CONFIG=") :].replace(python, "printf '%s\\n'")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[0] == "-u"
    assert words[-2:] == ["--seed", "7"]
    (program,) = [word for word in words if word.endswith("pretrain_gpt.py")]
    assert program.startswith(
        f"{tmp_path}/a b/runs/TIME_llama32-1b_wikipedia_FA_linear_mxfp8_smoke"
    )


def test_with_a_teacher_the_program_distils(tmp_path):
    text = shown(Project(tmp_path), cell("--teacher", str(tmp_path / "a run")))
    assert "_smoke_distilled/source/distill_gpt.py" in text
    assert f"--export-kd-teacher-load '{tmp_path}/a run'" in text
    assert "--export-kd-cfg" not in text
    made = cell("--teacher", "t", "--distillation-config", "/kd.yaml")
    assert "--export-kd-cfg /kd.yaml" in shown(Project(tmp_path), made)


def test_a_dry_run_without_data_names_what_to_pass(tmp_path):
    made = cell("--dataset", "dolma")
    bare = made.experiment.dataset.model_copy(update={"sample": False})
    text = shown(Project(tmp_path), made.changed("experiment", dataset=bare))
    assert "--tokenizer-model TOKENIZER \\\n" in text
    assert "--data-path DATA_PREFIX \\\n" in text


MISSING = {  # what is not given is as `smoke` has it
    "no data": (["--training-config", "fast"], "for wikipedia; "),
    "no index": (["C", "T", "no_tokenizer", "no_index"], "no_index.bin"),
    "no tokenizer": (["C", "T", "no_tokenizer", "no_index"], "The tokenizer no_tokenizer "),
    "a teacher without checkpoints": (["--teacher", "nowhere"], "nowhere"),
    "nodes without a shared folder": (
        ["--nnodes", "2", "--", "--micro-batch-size", "2"],
        "the argument CHECKPOINT",
    ),
}


@pytest.mark.parametrize("words, named", MISSING.values(), ids=MISSING)
def test_a_dry_run_lists_what_is_missing_where_its_run_ends(
    words, named, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = [*NAMES, "--training-config", "smoke", "--runs", str(tmp_path / "runs"), *words]
    train_config.train_with(["--dry-run", *words], False)
    missing = [line for line in capsys.readouterr().out.splitlines() if "# missing: " in line]
    assert any(named in line for line in missing)
    with pytest.raises(MissingError) as refused:
        train_config.train_with(words, False)
    assert f"# missing: {refused.value}" in missing
    assert not (tmp_path / "runs").exists()


def after(*flags):
    return ["--", *flags]


REFUSED = {
    "half of the data": (["C", "T", "."], DataError),
    "two layouts": (after("--tensor-model-parallel-size", "3"), LayoutError),
    "no checkout": (["--megatron", "nowhere"], OverlayError),
    "no such tracker": (["--tracker", "comet"], UnknownNameError),
    "no such model": (["--model", "gpt"], UnknownNameError),
    "an option that nothing reads": (["--overflow", "inf"], NoEffectError),
    "products of no attention": (
        ["--quantization", "linear_mxfp8", "--attention-gemms", "all"],
        NoEffectError,
    ),
    "attention's products of a tree": (
        ["--quantization", "source", "--attention-gemms", "all"],
        MqoError,
    ),
    "GEMMs of no linear layer": (["--quantization", "FA_mxfp8", "--gemms", "all"], NoEffectError),
    "a schedule beyond the end": (
        ["--schedule", "qk: mxfp8 until 9000, then none"],
        NoEffectError,
    ),
    "a schedule of another type": (["--schedule", "qk: mxfp4 until 9, then none"], MqoError),
    "a pattern of no layer": (["--exclude", "output_lair"], MqoError),
    "a pattern of no quantized layer": (["--exclude", "pv:*"], NoEffectError),
    "a flag of another kind": (after("--lr", "abc"), RunError),
    "a flag of others' layers": (after("--fp8-format", "hybrid"), FlagError),
    "layers without sizes": (after("--hybrid-layer-pattern", "M*"), PatternError),
    "flags that do not go together": (after("--use-legacy-models"), RunError),
    "documents that see each other": (
        after("--reset-attention-mask", "--dataloader-inter-document-masking", "--bf16", "--fp16"),
        RunError,
    ),
    "a trap": (after("--experimental-attention-variant", "dsa"), RunError),
    "layers that cannot be had": (
        after("--transformer-impl", "transformer_engine"),
        RunError,
    ),
}


@pytest.mark.parametrize("words, error", REFUSED.values(), ids=REFUSED)
def test_a_dry_run_is_refused_where_its_run_is(words, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "train", lambda *args: pytest.fail("it trains"))
    words = [*NAMES, "--training-config", "smoke", "--runs", str(tmp_path / "runs"), *words]
    own, flags = arguments.split_flags(words)
    texts = []
    for argv in ([*own, "--dry-run", "--", *flags], [*own, "--", *flags]):
        with pytest.raises(error) as refused:
            train_config.train_with(argv, False)
        texts.append(str(refused.value))
    assert texts[0] == texts[1]
    assert not (tmp_path / "runs").exists()


def test_an_unknown_literal_in_the_tree_is_refused(patched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (patched.tree.root / "pretrain_gpt.py").write_text("train()\n")
    site = patched.tree.root / patched.tree.manifest().touched_by("quant_sites")[0]
    site.write_text(site.read_text().replace("'none'", "'mxfp9'"))
    words = [*NAMES, "--training-config", "smoke", "--quantization", "source", "--allow-edits"]
    words += ["--megatron", str(patched.tree.root), "--runs", str(tmp_path / "runs")]
    for more in (["--dry-run"], []):
        with pytest.raises(OverlayError, match="mxfp9"):
            train_config.train_with([*words, *more], False)


def test_a_dry_run_of_an_edited_tree_is_refused_as_its_run_is(patched, tmp_path):
    root = patched.tree.root
    (root / "pretrain_gpt.py").write_text("train()\n")
    words = [*NAMES, "--training-config", "smoke", "--megatron", str(root), "--dry-run"]
    edited = root / patched.tree.manifest().touched_by("quant_sites")[0]
    edited.write_text(edited.read_text() + "# by hand\n")
    with pytest.raises(EditedError):
        train_config.train_with(words, False)
    train_config.train_with([*words, "--allow-edits"], False)


@pytest.mark.parametrize("edited", [True, False])
def test_the_shared_tree_is_checked_as_its_run_does(edited, vendored, monkeypatch):
    monkeypatch.setattr(type(vendored), "edited_files", lambda self: ["a.py"] * edited)
    project = Project(vendored.root.parent)
    check_tree(project, cell(), allow_edits=True)
    with pytest.raises(EditedError) if edited else nullcontext():
        check_tree(project, cell(), allow_edits=False)


def test_for_a_device_that_is_not_there_missing_data_are_a_note(capsys):
    train_config.train_with(
        [*NAMES, "--training-config", "standard", "--dry-run", "--device", "h200"], False
    )
    assert "# missing: No data was given for" in capsys.readouterr().out


def test_a_dry_run_of_a_checkout_runs_its_own_program(patched, tmp_path):
    (patched.tree.root / "pretrain_gpt.py").write_text("train()\n")
    made = cell("--megatron", str(patched.tree.root))
    types = {"fprop": "mxfp8", "dgrad": "none"}
    asked = made.quantization.model_copy(update={"types": types})
    made = made.model_copy(update={"quantization": asked})
    text = shown(Project(tmp_path), made)
    assert "# +        custom_quant_type = 'mxfp8'\n" in text
    assert f"{tmp_path}/runs/TIME" in text


def test_excluded_layers_go_into_quant_toml_and_a_dry_run_shows_them(tmp_path):
    made = cell("--exclude", "output_layer", "--exclude", "qk:decoder.layers.[01].*")
    exclude = ["output_layer", "qk:decoder.layers.[01].*"]
    text = shown(Project(tmp_path), made)
    assert '# quant.toml: exclude = ["output_layer", "qk:decoder.layers.[01].*"]\n' in text
    written = tomllib.loads(made.quant_toml({"qk": "mxfp8"}))
    assert written == {"asked": {"qk": "mxfp8"}, "layers": {"exclude": exclude}}
    assert "# quant.toml" not in shown(Project(tmp_path), cell())


def test_what_is_measured_and_dumped_goes_into_quant_toml():
    written = tomllib.loads(cell("--record-every", "0", "--dump", "1").quant_toml({}))
    assert written["record"] == {"every": 0, "dump": [1]}
    written = tomllib.loads(cell("--dump", "1", "--dump", "100").quant_toml({}))
    assert written["record"] == {"dump": [1, 100]}
    assert "record" not in tomllib.loads(cell().quant_toml({}))


def test_an_error_is_one_paragraph_and_exit_code_2():
    program = Project.here().root / "script" / "train_config.py"
    done = subprocess.run(
        [sys.executable, program, *NAMES, "--model", "gpt"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("mqo: There is no model called 'gpt'.")


def test_the_launcher_never_imports_torch():
    code = (
        "import sys; from mqo.commands import train_config; train_config.listing(); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'megatron')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- a CHECKPOINT in use ---------------------------------------------------------------------------


def test_a_run_whose_checkpoint_is_in_use_is_refused_and_makes_no_folder(tmp_path, capsys):
    saved, runs = tmp_path / "saved", tmp_path / "runs"
    words = [str(saved), *NAMES, "--training-config", "smoke", "--runs", str(runs)]
    with locked(saved, tmp_path / "first", Cluster(), print):
        with pytest.raises(RunError, match=f"{tmp_path}/first"):
            train_config.train_with(words, False)
        train_config.train_with([*words, "--dry-run"], False)
        assert f"# not yet: {saved} is in use by run {tmp_path}/first" in capsys.readouterr().out
    assert not runs.exists()
    train_config.train_with([*words, "--dry-run"], False)
    assert "in use" not in capsys.readouterr().out
