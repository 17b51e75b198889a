"""The committed scripts are the generated ones, and they are sound shell."""

import shutil
import subprocess

import pytest
from mqo.matrix import generate
from mqo.project import Project

SCRIPTS = Project.here().root / "script"
NAMES = [str(path) for path, _ in generate.scripts()]


@pytest.mark.parametrize(("path", "text"), list(generate.scripts()), ids=NAMES)
def test_the_committed_script_is_what_would_be_generated(path, text):
    assert (SCRIPTS / path).read_text() == text
    assert (SCRIPTS / path).stat().st_mode & 0o111


def test_no_committed_script_is_left_from_an_older_matrix():
    assert sorted(str(p.relative_to(SCRIPTS)) for p in SCRIPTS.glob("*/*.sh")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_bash_accepts_the_script(name):
    subprocess.run(["bash", "-n", SCRIPTS / name], check=True)


@pytest.mark.parametrize("name", NAMES)
def test_shellcheck_finds_nothing(name):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", SCRIPTS / name], check=True)


def test_writing_again_changes_nothing(tmp_path):
    assert len(generate.write(tmp_path)) == len(NAMES)
    assert generate.write(tmp_path) == []


def test_a_script_works_from_any_folder_and_passes_its_arguments_on(tmp_path):
    done = subprocess.run(
        [
            "bash",
            SCRIPTS / NAMES[0],
            "--training-config",
            "smoke",
            "--dry-run",
            "--",
            "--seed",
            "7",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "# source: fprop = mxfp8" in done.stdout
    assert "--num-layers 4" in done.stdout
    assert done.stdout.rstrip().endswith("--seed 7")
    assert not list(tmp_path.iterdir())
