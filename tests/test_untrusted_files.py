"""Only one module opens files from elsewhere: every other call that reads a file is listed here.

A function may read a file by itself only if the project ships the file, or writes it where nobody
else does.
"""

import ast
import re
import subprocess
from collections.abc import Iterator

import pytest
from mqo.project import Project

ROOT = Project.here().root
READER = "tools/mqo/megatron/run/untrusted.py"
PLACES = ("tools", "Megatron-LM", "script", "setup.py")
# Attributes of a path, a module or a class that read a file.
ATTRIBUTES = {"read_text", "read_bytes", "safe_open", "load_file", "from_pretrained", "from_file"}
ATTRIBUTES |= {"memmap", "fromfile", "open_memmap", "safe_load", "ZipFile", "GzipFile"}
# Functions of a module that read a file, or what a file holds.
OF_MODULES = {
    "json": {"load", "loads"},
    "tomllib": {"load", "loads"},
    "yaml": {"load", "safe_load", "full_load", "compose", "SafeLoader"},
    "torch": {"load"},
    "np": {"load", "genfromtxt", "loadtxt"},
    "numpy": {"load", "genfromtxt", "loadtxt"},
    "pickle": {"load", "loads", "Unpickler", "_Unpickler"},
    "tarfile": {"open"},
    "gzip": {"open", "decompress"},
    "bz2": {"open", "decompress"},
    "zipfile": {"ZipFile"},
    "shutil": {"copyfile", "copy", "copy2", "copytree", "unpack_archive"},
    "os": {"open"},
    "io": {"open"},
}
NAMES = {"safe_open", "load_file", "memmap"}
M, T = "Megatron-LM/megatron/", "tools/mqo/"
Q, R = f"{T}quant/", f"{T}megatron/run/"
PTQ = "Megatron-LM/examples/export/ptq_and_trtllm_export/text_generation_ptq.py::"
REASONS = {
    "a file that this project ships": [
        f"{Q}cpu/compile.py::_source_digest",
        f"{Q}formats.py::",
        f"{Q}__init__.py::_modules",
        "setup.py::BuildWithBundle.run",
        "tools/bootstrap.py::_constraints",
        "tools/bootstrap.py::_fingerprint",
        f"{T}launch/export.py::export",
        f"{T}launch/hf_config.py::keys_without_effect",
        f"{T}launch/prepare.py::_place_programs",
        f"{T}launch/program_cache.py::source_of",
        f"{R}args_table.py::read_table",
        f"{T}matrix/generate.py::_write",
        f"{T}matrix/generate.py::write",
        f"{T}matrix/tables.py::_load",
        f"{T}overlay/goal.py::_digest",
        f"{T}overlay/series.py::Entry._module",
        f"{T}overlay/series.py::added_files",
        f"{T}perf/verdicts.py::tables",
        f"{T}project.py::Project.version",
        f"{T}scale/devices.py::_read",
        f"{T}scale/simulated.py::_rows",
    ],
    "source of the tree whose programs are run": [
        "Megatron-LM/preflight.py::check_patched",
        f"{Q}source.py::site_types",
        f"{T}launch/bytecode.py::_is_current",
        f"{T}launch/bytecode.py::_link",
        f"{T}launch/program_cache.py::_key",
        f"{T}overlay/snapshot.py::_copy",
        f"{T}overlay/snapshot.py::_write_types",
        f"{T}overlay/snapshot.py::snapshot",
        f"{T}overlay/verify/release.py::_verify",
    ],
    "the store of a tree, which mqo wrote": [
        f"{T}overlay/records.py::read",
        f"{T}overlay/transaction.py::_recover_incoming",
        f"{T}overlay/transaction.py::_sync",
        f"{T}overlay/tree.py::Tree.reading",
    ],
    "what the same command or its child wrote": [
        f"{Q}config.py::load",
        f"{PTQ}describe",
        f"{PTQ}write",
        "Megatron-LM/tools/check_run.py::",
        "Megatron-LM/tools/simulate.py::main",
        f"{T}overlay/verify/forward.py::_result",
        f"{T}perf/trace.py::read",
        f"{T}program.py::Program._exit_code",
        f"{T}program.py::Program.wait",
        f"{T}program.py::ask",
        f"{T}launch/origin.py::_key",
        f"{T}sweep/state.py::SweepFolder._locked",
        "tools/bootstrap.py::_is_ready",
    ],
    "a download that is compared with its pinned hash": [
        f"{T}data/mix.py::_npm_archive",
        f"{T}data/mix.py::_npm_texts.texts",
        f"{T}data/sample.py::articles",
        f"{T}data/sample.py::fetch",
        f"{T}data/sample.py::read_dump",
        f"{T}overlay/vendor.py::read_wheel",
    ],
    "a file of the system or of an installed package": [
        f"{R}isolated.py::_restrict",
        f"{R}isolated.py::available_memory",
        f"{R}isolated.py::machine_memory",
        f"{R}packages.py::_listed_files",
        f"{R}packages.py::_loaded_files",
        f"{R}packages.py::_module_names",
        f"{T}data/mix.py::_dictionary",
        f"{T}data/mix.py::_essays",
        f"{T}doctor.py::_container_limit",
        f"{T}launch/lock_holder.py::Host.here",
        f"{T}launch/lock_holder.py::_stat",
        f"{T}launch/machine.py::cpu_model",
        f"{T}launch/machine.py::torch_cuda",
        f"{T}process.py::drop_output",
    ],
    "after check_file or check_tokenizer in the same function": [
        f"{PTQ}quantize",
        f"{M}inference/hf_folder.py::check_config",
        f"{T}data/encode.py::gpt2",
        f"{T}data/encode.py::_huggingface",
        f"{T}launch/hf_tokenizer.py::_own_ids",
    ],
    "an entry of a shard after check_file, only its list of parts": [f"{R}shards.py::entry_fault"],
    "in a child with limits of time and memory": [f"{R}foreign_tokenizer.py::_load"],
    "what open_file or read_bytes of the reader opened": [
        f"{T}data/corpus.py::_unpacked",
        f"{T}data/pair_check.py::_entries",
        f"{T}data/pair_check.py::largest_id",
    ],
    "a text in memory, of a bounded size": [
        f"{Q}config.py::parse",
        f"{T}data/corpus.py::_texts",
    ],
    "opens to write as well, with the checks of the reader": [
        f"{T}launch/checkpoint_lock.py::_open"
    ],
    "only this user's file, with its digest and a bounded size": [f"{Q}cpu/compile.py::_read"],
    "each file goes through copy_file": [f"{T}launch/rerun.py::_copy"],
    "packs for writing, links as links": [f"{T}track/content.py::pack"],
    "opens a run at a tracker, not a file": [f"{T}track/session.py::Session.__init__"],
    "runs without this package, next to a folder that its user exported": [
        "Megatron-LM/tools/dequantize.py::write"
    ],
}
ALLOWED = {place: reason for reason, places in REASONS.items() for place in places}


def reads(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield (function, call) for each call that reads a file; functions as Class.method."""

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (*names, node.name)
        if isinstance(node, ast.Call) and is_read(node):
            yield ".".join(names), node
        for child in ast.iter_child_nodes(node):
            yield from visit(child, names)

    yield from visit(tree, ())


def is_read(call: ast.Call) -> bool:
    """Return whether a call reads a file: an open in a mode that only writes does not."""
    match call.func:
        case ast.Name("open"):
            return not writes(call.args[1:], call)
        case ast.Attribute(ast.Name(module), name) if module in OF_MODULES:
            return name in OF_MODULES[module] | ATTRIBUTES
        case ast.Attribute(_, "open"):
            return not writes(call.args, call)
        case ast.Attribute(_, name):
            return name in ATTRIBUTES
        case ast.Name(name):
            return name in NAMES
    return False


def writes(positional: list[ast.expr], call: ast.Call) -> bool:
    modes = [word.value for word in call.keywords if word.arg == "mode"] or positional[:1]
    match modes:
        case [ast.Constant(str(mode))]:
            return bool(re.fullmatch(r"[wax]b?", mode))
    return False


def found() -> dict[str, int]:
    """{"file::function": the number of reads in it} of the product's code."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *PLACES],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    counts: dict[str, int] = {}
    for name in filter(None, listed.stdout.split("\0")):
        if name.endswith(".py") and name != READER and (ROOT / name).exists():
            for function, _ in reads(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
                key = f"{name}::{function}"
                counts[key] = counts.get(key, 0) + 1
    return counts


def test_files_from_elsewhere_are_opened_in_one_module():
    counts = found()
    assert sorted(counts.keys() - ALLOWED.keys()) == []


def test_every_exception_is_still_needed_and_has_a_reason():
    assert sorted(ALLOWED.keys() - found().keys()) == []
    assert [key for key, reason in ALLOWED.items() if len(reason.split()) < 3] == []


@pytest.mark.parametrize(
    "text",
    [
        *("open(x)", "open(x, 'r+')", "open(x, mode)", "x.open()", "x.open('rb')", "io.open(x)"),
        *("os.open(x, 0)", "x.read_text()", "x.read_bytes()", "json.load(x)", "json.loads(x)"),
        *("tomllib.load(x)", "yaml.safe_load(x)", "torch.load(x)", "np.load(x)", "np.memmap(x)"),
        *("safe_open(x)", "load_file(x)", "AutoTokenizer.from_pretrained(x)", "pickle.load(x)"),
        *("tarfile.open(x)", "gzip.open(x)", "bz2.open(x)", "zipfile.ZipFile(x)"),
        *("Tokenizer.from_file(x)", "shutil.copyfile(x, y)", "shutil.copytree(x, y)"),
    ],
)
def test_a_read_is_found_wherever_it_stands(text):
    tree = ast.parse(f"class C:\n  def f(self):\n    if x:\n      return [{text}]")
    assert [place for place, _ in reads(tree)] == ["C.f"]


@pytest.mark.parametrize(
    "text", ["open(x, 'w')", "x.open('ab')", "x.open(mode='x')", "x.write_text(y)", "json.dumps(x)"]
)
def test_a_write_is_none(text):
    assert list(reads(ast.parse(text))) == []
