"""Wheels in miniature, a project that verifies its patches on two of them, and a plain git."""

import base64
import hashlib
import io
import os
import shutil
import subprocess
import zipfile
from dataclasses import dataclass

import pytest
from mqo import pip
from mqo.errors import SetupError
from mqo.overlay.series import Series
from mqo.overlay.tree import sha256
from mqo.overlay.vendor import Pin
from mqo.overlay.verify.release import verify
from mqo.project import Project

from ..conftest import CODEMOD, FILES, SERIES


def wheel(files, *, record=None, extra=()):
    """A wheel's bytes; `record` replaces the digests of RECORD, `extra` are further members."""
    digests = {p: hashlib.sha256(c).digest() for p, c in files.items()} | (record or {})
    rows = [
        f"{p},sha256={base64.urlsafe_b64encode(d).rstrip(b'=').decode()},1"
        for p, d in digests.items()
    ]
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        last = ("megatron_core-1.2.3.dist-info/RECORD", "\n".join(rows))
        for member, data in (*files.items(), *extra, last):
            # Of one time, so that the same files are the same wheel.
            info = member if isinstance(member, zipfile.ZipInfo) else zipfile.ZipInfo(member)
            archive.writestr(info, data)
    return content.getvalue()


@pytest.fixture
def plain_git(monkeypatch):
    """Git without the user's configuration; skips where there is none."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "a tester")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "tester@example.org")


def git(root, *words):
    """What `git` prints in a folder."""
    command = ["git", "-C", root, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def commit_all(root, *options):
    """Commit everything in a folder, which becomes a git work tree where it is none."""
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "--all", "--force")
    git(root, "commit", "-qm", "a commit", *options)


# -- a project that verifies -------------------------------------------------------------------

SITES = ("fprop", "dgrad", "wgrad", "qk", "pv")
GEMMS = "megatron/core/gemms.py"
PLAIN = "megatron/core/plain.py"
RELEASES = ("1.1.0", "1.2.3")

SITE_PATCH = f"""
from mqo.overlay.edits import AddImport, Anchor, FileEdits, InsertBefore

SITES = {SITES}
ANCHOR = "left @ right"


def literal(site):
    code = f"custom_quant_type = 'none'\\n{{site}} = operands('{{site}}', custom_quant_type)\\n"
    return InsertBefore(site, (Anchor(ANCHOR),), code)


FILES = (
    FileEdits(
        "{GEMMS}", (AddImport("from megatron.ours import operands"), *map(literal, SITES))
    ),
)
"""

# Reports what a model would whose quantizers follow the literals in its own tree.
PROGRAM = r"""
import re, sys
from pathlib import Path

def run():
    gemms = (Path(__file__).parents[1] / "megatron/core/gemms.py").read_text()
    found = re.findall(r"custom_quant_type = '(\w+)'\n +(\w+) =", gemms)
    quantized = [(site, kind) for kind, site in found if kind != "none"]
    records = [
        [site, "layer", side, kind, 1] for site, kind in quantized for side in ("lhs", "rhs")
    ]
    loss = 1.0 + len(records)
    facts = {"loss": loss, "fused_loss": loss, "gradients": f"{len(records)}", "finite": True}
    facts |= {"linear_layers": ["layer"], "attention_layers": ["layer"], "records": records}
    return facts
"""

PIN_TEXT = """
schema = 1
version = "1.2.3"
packages = ["megatron/core", "megatron/training"]
pythons = ["3.11"]
[helper]
version = "1.0.0"
pythons = []
source = "megatron/core/none.cpp"
source_sha256 = ""
[wheels]
"""


WHEEL = "megatron_core-1.2.3-cp311-cp311-any.whl"


def pin_text(wheels):
    """UPSTREAM.toml of release 1.2.3, which trusts these wheels, {name: bytes}."""
    return PIN_TEXT + "".join(f'"{name}" = "{sha256(c)}"\n' for name, c in wheels.items())


def release(version):
    """The files of a release."""
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    gemms = [f"def {site}(left, right):\n    return left @ right\n" for site in SITES]
    return {
        "megatron/core/package_info.py": "".join(f"{k} = {v}\n" for k, v in numbers).encode(),
        GEMMS: "\n\n".join(["import os\n", *gemms]).encode(),
        PLAIN: b"import old_engine, new_engine\n\nstart = old_engine.start\n",
    }


PIN = pin_text({WHEEL: wheel(FILES)})


@dataclass
class Trial:
    """A project in a folder of its own: patches, our part of the tree, and cached wheels."""

    project: Project

    def put_wheel(self, version, files, *, names=None):
        """Cache a wheel of `version` and pin it; `names` are the releases that it is pinned as."""
        folder = self.project.cache / "wheels"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"megatron_core-{version}-cp311-cp311-any.whl").write_bytes(wheel(files))
        there = {path.name: path.read_bytes() for path in sorted(folder.glob("*.whl"))}
        self.project.upstream_pin.write_text(pin_text(there))

    def drop_wheel(self, version):
        """Empty the cache of a release, which stays pinned."""
        (self.project.cache / f"wheels/megatron_core-{version}-cp311-cp311-any.whl").unlink()

    def change(self, path, old, new):
        """Change a file of the project: a patch, or the program."""
        file = self.project.root / path
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    def verify(self, version="1.2.3"):
        """The result for one release."""
        project = self.project
        pin, series = Pin.load(project.upstream_pin), Series.of_project(project)
        return verify(version, pin, series, project.cache, report=lambda text: None)


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """A project on which everything is green; without a network."""
    trial = Trial(Project(tmp_path / "project"))
    texts = {
        "patches/series.toml": SERIES,
        "patches/quant_sites.py": SITE_PATCH,
        "patches/new_engine.py": CODEMOD,
        "Megatron-LM/megatron/ours.py": "def operands(*args): ...\n",
        "Megatron-LM/tools/verify_forward.py": PROGRAM,
    }
    for name, text in texts.items():
        path = trial.project.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for version in RELEASES:
        trial.put_wheel(version, release(version))

    def offline(requirement, folder, **options):
        raise SetupError(f"pip could not download {requirement}")

    monkeypatch.setattr(pip, "download", offline)
    return trial
