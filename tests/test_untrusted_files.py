"""Only one module opens files from elsewhere: every other call that reads a file is listed here.

A function may read a file by itself only if the project ships the file, or writes it where nobody
else does.
"""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest
from mqo.project import Project

ROOT = Project.here().root
READER = "tools/mqo/megatron/run/untrusted.py"
PLACES = ("tools", "Megatron-LM", "patches", "script", "setup.py")
# Attributes of a path, a module or a class that read a file.
ATTRIBUTES = {"read_text", "read_bytes", "safe_open", "load_file", "from_pretrained", "from_file"}
ATTRIBUTES |= {"memmap", "fromfile", "open_memmap", "safe_load", "ZipFile", "GzipFile"}
ATTRIBUTES |= {"EventAccumulator", "ParquetFile", "FileSystemReader", "iterparse", "read_csv"}
ATTRIBUTES |= {
    "spec_from_file_location",
    "SourceFileLoader",
    "run_path",
    "getlines",
    "load_dataset",
}
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
NAMES = {"safe_open", "load_file", "memmap", "exec", "eval"}
# Modules that product code does not need: the import of one counts as a read.
MODULES = {"mmap", "sqlite3", "configparser", "shelve", "marshal", "dbm", "fileinput", "runpy"}
MODULES |= {"lzma", "tokenize", "imp", "dill", "joblib", "cloudpickle", "h5py", "pandas"}
OURS = {"mqo", "megatron"}
USUAL = {("numpy", "np")}  # (module, its other name)
M, T = "Megatron-LM/megatron/", "tools/mqo/"
Q, R = f"{T}quant/", f"{T}megatron/run/"
PTQ = "Megatron-LM/examples/export/ptq_and_trtllm_export/text_generation_ptq.py::"
REASONS = {
    "a file that this project ships": [
        f"{Q}cpu/compile.py::_source_digest",
        f"{Q}formats.py:: x2",
        f"{Q}__init__.py::_modules",
        "setup.py::BuildWithBundle.run",
        "tools/bootstrap.py::_constraints",
        "tools/bootstrap.py::_fingerprint x2",
        f"{T}commands/plugin.py::new",
        f"{T}launch/export.py::export",
        f"{T}launch/hf_config.py::keys_without_effect x2",
        f"{T}launch/prepare.py::_place_programs x2",
        f"{T}launch/program_cache.py::LazySource.digests",
        f"{T}launch/program_cache.py::LazySource.path",
        f"{R}args_table.py::read_table x2",
        f"{T}matrix/generate.py::_write",
        f"{T}matrix/generate.py::write_table",
        f"{T}matrix/tables.py::_load x2",
        f"{T}overlay/goal.py::_digest",
        f"{T}overlay/series.py::Entry._module x2",
        f"{T}overlay/series.py::added_files",
        f"{T}perf/verdicts.py::tables x2",
        f"{T}project.py::Project.version x2",
        f"{T}scale/devices.py::_read x2",
        f"{T}scale/simulated.py::_rows",
    ],
    "source of the tree whose programs are run": [
        "Megatron-LM/preflight.py::check_patched",
        f"{R}start.py::_classes",
        f"{R}start.py::source_of",
        f"{Q}source.py::site_types",
        f"{T}launch/bytecode.py::_is_current x2",
        f"{T}launch/bytecode.py::_link",
        f"{T}launch/flags.py::_can_hash",
        f"{T}launch/program_cache.py::_key",
        f"{T}overlay/snapshot.py::_copy",
        f"{T}overlay/snapshot.py::_link",
        f"{T}overlay/snapshot.py::digests",
        f"{T}overlay/snapshot.py::lend_helper x3",
        f"{T}overlay/snapshot.py::snapshot",
        f"{T}overlay/verify/release.py::_verify",
    ],
    "the store of a tree, which mqo wrote": [
        f"{T}overlay/records.py::read",
        f"{T}overlay/transaction.py::_recover_incoming",
        f"{T}overlay/transaction.py::_sync",
        f"{T}overlay/tree.py::Tree.shared",
    ],
    "a file of one user's training, which it wrote or went on": [
        f"{T}launch/events.py::copy_events",
    ],
    "a regular file, read in batches by pyarrow": [f"{T}data/corpus.py::_parquet"],
    "reads checkpoints, with torch's reader restricted": [
        "Megatron-LM/tools/weight_digests.py::",
        f"{R}unpickle.py::",
        f"{R}unpickle.py::Reader x2",
        f"{R}unpickle.py::protect",
    ],
    "what the same command or its child wrote": [
        f"{Q}config.py::load",
        f"{PTQ}find_source x2",
        f"{PTQ}write",
        f"{R}answer.py::loaded",
        f"{R}answer.py::main x2",
        f"{T}perf/trace.py::read x3",
        f"{T}program.py::_exit_code x2",
        f"{T}program.py::ask x5",
        f"{T}launch/origin.py::_key",
        f"{T}sweep/state.py::SweepFolder.held",
        "tools/bootstrap.py::_is_ready",
    ],
    "a download that is compared with its pinned hash": [
        f"{T}data/debian_docs.py::_texts",
        f"{T}data/mix.py::_npm_texts x2",
        f"{T}data/sample.py::articles x2",
        f"{T}data/sample.py::fetch",
        f"{T}data/sample.py::read_dump",
        f"{T}overlay/vendor.py::_read_record",
        f"{T}overlay/vendor.py::read_wheel",
    ],
    "a file of the system or of an installed package": [
        f"{R}isolated.py::_restrict x2",
        f"{R}isolated.py::available_memory x2",
        f"{R}isolated.py::machine_memory",
        f"{R}packages.py::_is_loaded",
        f"{R}packages.py::_loaded_files",
        f"{R}packages.py::_module_names",
        f"{T}data/mix.py::_dictionary x2",
        f"{T}data/mix.py::_essays x2",
        f"{T}launch/lock_holder.py::Host.here",
        f"{T}launch/lock_holder.py::_stat",
        f"{T}launch/machine.py::cpu_model",
        f"{T}launch/machine.py::torch_cuda",
        f"{T}recipes/quantizer_packages.py::_folders x2",
        f"{T}process.py::drop_output",
    ],
    "after check_file or check_tokenizer in the same function": [
        f"{PTQ}quantize",
        f"{R}hf_kind.py::check_config",
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
        f"{T}data/corpus.py::_texts_of",
    ],
    "opens to write as well, with the checks of the reader": [
        f"{T}launch/checkpoint_lock.py::_open"
    ],
    "only this user's file, with its digest and a bounded size": [
        f"{Q}cpu/compile.py::_Cache.load_overload",
        f"{Q}cpu/compile.py::_read",
    ],
    "each file goes through copy_file": [f"{T}launch/rerun.py::_copy"],
    "packs for writing, links as links": [f"{T}track/content.py::pack x2"],
    "opens a run at a tracker, not a file": [f"{T}track/session.py::Session.__init__"],
    "a file that the caller of the library names, in Python": [
        f"{Q}own_formats.py::load_formats x2",
        f"{Q}recipe.py::_keys x2",
    ],
    "code of the user, which the command or the caller names to run": [
        f"{Q}plugin_file.py::_run",
        f"{T}launch/plugins.py::copy_files",
    ],
    "a regular file of a bounded size, which is checked in the same function": [
        f"{Q}plugin_modules.py::_read",
    ],
    "a text in a checkpoint, of a bounded size": [
        f"{R}plugin_states.py::load_states",
    ],
    "runs without this package, next to a folder that its user exported": [
        "Megatron-LM/tools/dequantize.py::",
        "Megatron-LM/tools/dequantize.py::write x4",
    ],
}
# {"file::function": the number of reads in it}; " x2" says that it is not one.
ALLOWED = {
    place.partition(" x")[0]: int(place.partition(" x")[2] or 1)
    for places in REASONS.values()
    for place in places
}


def reads(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield (function, node) for each read of a file; functions as Class.method."""

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (*names, node.name)
        if is_read(node):
            yield ".".join(names), node
        for child in ast.iter_child_nodes(node):
            # The arguments of a call of open say more than its name.
            if isinstance(node, ast.Call) and child is node.func and is_open(child):
                child = getattr(child, "value", ast.Pass())
            yield from visit(child, names)

    yield from visit(tree, ())


def is_open(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(ast.Name(module), "open") if module in OF_MODULES:
            return False
        case ast.Name("open") | ast.Attribute(_, "open"):
            return True
    return False


def is_read(node: ast.AST) -> bool:
    """Return whether a node calls, names or imports what reads a file.

    An open in a mode that only writes does not, and neither does one of a method of a class.
    """
    match node:
        case ast.Call(ast.Name("open")):
            return not writes(node.args[1:], node)
        case ast.Call(ast.Attribute(_, "open") as function) if is_open(function):
            return not writes(node.args, node)
        case ast.Attribute(ast.Name(module), name, ast.Load()) if module in OF_MODULES:
            return name in OF_MODULES[module] | ATTRIBUTES
        case ast.Attribute(_, name, ast.Load()):
            return name in ATTRIBUTES or name == "open"
        case ast.Name(name, ast.Load()):
            return name in NAMES or name == "open"
        case ast.Import(modules):
            others = {(one.name, one.asname) for one in modules if one.asname} - USUAL
            return any(one.name.split(".")[0] in MODULES for one in modules) or any(
                name in OF_MODULES for name, _ in others
            )
        case ast.ImportFrom(module=str(module), names=names):
            first = module.split(".")[0]
            hidden = OF_MODULES.get(module, set()) | (set() if first in OURS else ATTRIBUTES)
            return first in MODULES or any(one.name in hidden for one in names)
    return False


def writes(positional: list[ast.expr], call: ast.Call) -> bool:
    modes = [word.value for word in call.keywords if word.arg == "mode"] or positional[:1]
    match modes:
        case [ast.Constant(str(mode))]:
            return bool(re.fullmatch(r"[wax]b?", mode))
    return False


def product() -> dict[str, str]:
    """{name: text} of the product's code."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *PLACES],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    names = [name for name in listed.stdout.split("\0") if name.endswith(".py")]
    return {name: (ROOT / name).read_text("utf-8") for name in names if (ROOT / name).exists()}


def found(texts: dict[str, str]) -> dict[str, int]:
    """{"file::function": the number of reads in it}."""
    places = [
        f"{name}::{function}"
        for name, text in texts.items()
        if name != READER
        for function, _ in reads(ast.parse(text))
    ]
    return dict(Counter(places))


def test_files_from_elsewhere_are_opened_in_one_module():
    counts = found(product())
    assert sorted(counts.items() - ALLOWED.items()) == []
    assert sorted(ALLOWED.items() - counts.items()) == [], "these exceptions are not needed"
    assert [reason for reason in REASONS if len(reason.split()) < 3] == []


@pytest.mark.parametrize(
    "folder",
    [
        *("tools", "tools/mqo/quant", "tools/mqo/megatron/run", "tools/mqo/launch"),
        *("Megatron-LM", "Megatron-LM/tools", "Megatron-LM/megatron/inference", "patches"),
        *("script", "Megatron-LM/examples/export/ptq_and_trtllm_export"),
    ],
)
def test_a_new_loader_is_noticed_in_each_folder(folder):
    texts = product()
    name = next(n for n in texts if n.rpartition("/")[0] == folder and n != READER)
    text = f"{texts[name]}\n\ndef added(path):\n    return torch.load(path)\n"
    assert found({name: text}).items() - ALLOWED.items() == {(f"{name}::added", 1)}


def test_another_read_in_a_listed_function_is_noticed():
    place = f"{T}launch/machine.py::cpu_model"
    name, _, function = place.partition("::")
    text = re.sub(
        rf"(?m)^(def {function}\(.*)$", r"\1\n    json.load(path)", product()[name], count=1
    )
    assert found({name: text}).items() - ALLOWED.items() == {(place, ALLOWED[place] + 1)}


@pytest.mark.parametrize(
    "text",
    [
        *("open(x)", "open(x, 'r+')", "open(x, mode)", "x.open()", "x.open('rb')", "io.open(x)"),
        *("os.open(x, 0)", "x.read_text()", "x.read_bytes()", "json.load(x)", "json.loads(x)"),
        *("tomllib.load(x)", "yaml.safe_load(x)", "torch.load(x)", "np.load(x)", "np.memmap(x)"),
        *("safe_open(x)", "load_file(x)", "AutoTokenizer.from_pretrained(x)", "pickle.load(x)"),
        *("tarfile.open(x)", "gzip.open(x)", "bz2.open(x)", "zipfile.ZipFile(x)"),
        *("Tokenizer.from_file(x)", "shutil.copyfile(x, y)", "shutil.copytree(x, y)"),
        *("map(json.loads, x)", "map(Path.read_text, x)", "f(open)", "f(x.open)", "exec(x)"),
        *("f(pickle.Unpickler)", "a.EventAccumulator(x)", "pq.ParquetFile(x)", "runpy.run_path(x)"),
        *("ElementTree.iterparse(x)", "importlib.util.spec_from_file_location(x, y)"),
        *("Path(json.load(x)).open('w')", "x.mode('a').read_bytes().open('w')"),
    ],
)
def test_a_read_is_found_wherever_it_stands(text):
    tree = ast.parse(f"class C:\n  def f(self):\n    if x:\n      return [{text}]")
    assert [place for place, _ in reads(tree)] == ["C.f"]


@pytest.mark.parametrize(
    "text",
    [
        *("from json import loads", "import json as j", "from torch import load", "import mmap"),
        *("import sqlite3", "from configparser import ConfigParser", "import xml.dom, lzma"),
        *("from tokenizers import from_file", "from os import open as o"),
    ],
)
def test_an_import_that_hides_a_read_is_found(text):
    assert [place for place, _ in reads(ast.parse(f"def f():\n  {text}"))] == ["f"]


@pytest.mark.parametrize(
    "text", ["open(x, 'w')", "x.open('ab')", "x.open(mode='x')", "x.write_text(y)", "json.dumps(x)"]
)
def test_a_write_is_none(text):
    assert list(reads(ast.parse(text))) == []
