"""The options of a run: flags and quant.toml follow from one definition."""

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from mqo.errors import MqoError, UnknownNameError
from mqo.launch import arguments
from mqo.launch.config import resolve
from mqo.launch.options import OPTIONS, given, quant_toml, schedules
from mqo.project import Project

TYPES = {"fprop": "mxfp4", "dgrad": "none", "wgrad": "mxfp4", "qk": "mxfp8", "pv": "none"}


def a_value_of(option):
    """A value that is not the default."""
    for value in (*option.valid, 1, ["output_layer"], [3]):
        try:
            option.check(value)
        except ValueError:
            continue
        if value != option.default:
            return value
    raise AssertionError(f"no value of {option.name} is known here")


def words_of(option, value):
    if value is True:
        return [option.flag]
    values = value if option.many else [value]
    return [word for one in values for word in (option.flag, str(one))]


def test_only_what_was_chosen_is_written():
    assert tomllib.loads(quant_toml(TYPES, {})) == {"asked": TYPES}
    chosen = {"block": 64, "cache_weights": True, "save_activations": "packed", "every": 0}
    written = tomllib.loads(quant_toml(TYPES, chosen, ["qk: mxfp8"]))
    assert written == {
        "asked": TYPES,
        "quantizer": {"block": 64, "cache_weights": True, "save_activations": "packed"},
        "schedule": {"qk": "mxfp8"},
        "record": {"every": 0},
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_goes_from_its_flag_into_its_table(name):
    option = OPTIONS[name]
    value = a_value_of(option)
    args = arguments.parser().parse_args(words_of(option, value))
    assert given(args) == {name: value}
    written = tomllib.loads(
        resolve(
            *("llama32-1b", "wikipedia", "qk_pv_mxfp8", "tiny"),
            checkpoint=Path("checkpoints"),
            **given(args),
        ).quant_toml({})
    )
    assert written == {"asked": {}, option.table: {name: value}}


def test_training_reads_what_is_written(tmp_path):
    """The tree's own reader, in a process with torch, finds each value where mqo has put it."""
    chosen = {name: a_value_of(option) for name, option in OPTIONS.items()}
    (tmp_path / "quant.toml").write_text(quant_toml(TYPES, chosen))
    code = (
        "import sys; from pathlib import Path; from mqo.quant.config import load;"
        "found = load(Path(sys.argv[1]));"
        "print({n: list(v) if isinstance(v, tuple) else v for n, v in vars(found).items()"
        " if n != 'memo'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "quant.toml"],
        cwd=Project.here().tree,
        capture_output=True,
        text=True,
        check=True,
    )
    none = {
        "schedule": {},
        "operands": {},
        "rules": [],
        "recipes": {},
        "formats": {},
        "plugins": {},
    }
    assert ast.literal_eval(done.stdout) == {**chosen, "asked": TYPES, **none}


def test_the_page_on_formats_has_each_key_in_its_table():
    text = (Project.here().root / "docs/formats.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `\[(\w+)\]` \| (.*) \|$", text, re.MULTILINE))
    shown = {
        table: re.findall(r"`(\w+)`(?: \(`(--[\w-]+)`\))?", row) for table, row in rows.items()
    }
    expected = {}
    for name, option in OPTIONS.items():
        flag = "" if option.flag == f"--{name.replace('_', '-')}" else option.flag
        expected.setdefault(option.table, set()).add((name, flag))
    assert {table: set(keys) for table, keys in shown.items()} == expected


def test_a_kind_stands_for_its_quantized_sites():
    found = schedules(TYPES, ["linear: mxfp4 until 0.9, then bf16", "attention:mxfp8"])
    assert found == {
        "fprop": "mxfp4 until 0.9, then bf16",
        "wgrad": "mxfp4 until 0.9, then bf16",
        "qk": "mxfp8",
    }


def test_a_site_may_be_named_though_it_begins_unquantized():
    assert schedules(TYPES, ["pv: none until 0.1, then mxfp8"]) == {
        "pv": "none until 0.1, then mxfp8"
    }


def test_what_names_no_site_is_refused():
    with pytest.raises(UnknownNameError, match=r"'mlp'.*attention, dgrad, .*fprop, linear"):
        schedules(TYPES, ["mlp: mxfp8"])
    with pytest.raises(MqoError, match=r"'attention: mxfp8'.* qk, pv"):
        schedules({"qk": "none", "pv": "none"}, ["attention: mxfp8"])
    with pytest.raises(MqoError, match="schedules for fprop"):
        schedules(TYPES, ["fprop: mxfp8", "linear: mxfp8"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 48}, "block: unknown block 48; valid: 16, 32, 64, 128"),
        ({"exclude": (":*",)}, "unknown GEMM site or kind of them ''"),
        ({"exclude": ("mlp:*",)}, "'mlp'; valid: fprop, dgrad"),
        ({"dump": (0,)}, r"dump: .*0.*; valid: "),
    ],
)
def test_an_unknown_value_is_refused(options, message):
    with pytest.raises(MqoError, match=message):
        resolve("llama32-1b", "wikipedia", "bf16", "tiny", **options)


def test_a_value_that_is_none_is_refused_on_the_command_line():
    for words in (["--block", "48"], ["--dump", "-1"], ["--record-every", "x"]):
        with pytest.raises((MqoError, argparse.ArgumentError)):
            arguments.parser().parse_args(words)
