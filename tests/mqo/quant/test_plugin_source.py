"""What a file of quantizers declares, unrun."""

import os

import pytest
from mqo.quant.plugin_file import load_quantizers
from mqo.quant.plugin_modules import digest_of, local_files
from mqo.quant.plugin_source import declared
from mqo.quant.plugins import PLUGINS

HEAD = "from mqo import quant\nfrom mqo.quant import quantizer\n"
BODY = "def mine(x, context):\n    return x\n"
MINE = f'@quantizer("mine")\n{BODY}'


@pytest.mark.parametrize(
    "decorator",
    [
        'quantizer("mine")',
        'quantizer(name="mine")',
        'quant.quantizer("mine", block=None, options=None, state=None)',
        'quantizer("mine", block=0x10)',
        'quantizer("mine", block=4096, square=True)',
        'quantizer("mine", needs_amax=True, stochastic=False)',
        'quantizer("mine", stochastic=True, independent_rows=True)',
        'quantizer("m" "ine", options={})',
        'quantizer("mine", options={"low": -1.5, "n": 1_000, "on": True, "kind": "a b", "z": 0})',
        'quantizer("mine", options={"tiny": 1e-300, "one_float": 1.0, "one_int": 1})',
    ],
)
def test_a_text_declares_what_the_decorator_registers(write_file, decorator):
    path = write_file(f"{HEAD}@{decorator}\n{BODY}")
    read = declared(path)
    assert load_quantizers(path) == ["mine"]
    assert read == {"mine": PLUGINS["mine"]}
    assert read["mine"].function is None
    # 1, 1.0 and True are equal, but are options of different kinds.
    kinds = [
        {name: type(v) for name, v in p.options.items()} for p in (*read.values(), PLUGINS["mine"])
    ]
    assert kinds[0] == kinds[1]


def test_all_functions_at_the_top_level_count(write_file):
    other = MINE.replace("mine", "other")
    text = f"{HEAD}import functools\n@functools.cache\n{MINE}\n{other}\ndef no_quantizer(): ...\n"
    assert list(declared(write_file(text))) == ["mine", "other"]


INVALID = {
    "not Python": "def mine(:\n",
    "a zero byte": f"{MINE}\0",
    "nested without end": f"x = {'-' * 100_000}1\n{MINE}",
    "a name": f"KIND = 'mine'\n@quantizer(KIND)\n{BODY}",
    "a call": f'@quantizer(str("mine"))\n{BODY}',
    "an f-string": f"@quantizer(f'mi{{1}}')\n{BODY}",
    "a product": f'@quantizer("mine", block=4 * 8)\n{BODY}',
    "a list of names": f'@quantizer(*["mine"])\n{BODY}',
    "a dict of names": f'@quantizer("mine", **{{"block": 16}})\n{BODY}',
    "an unhashable key": f'@quantizer("mine", options={{[]: 1}})\n{BODY}',
    "an unknown argument": f'@quantizer("mine", blok=16)\n{BODY}',
    "a field that is no argument": f'@quantizer("mine", needs_tensor_amax=True)\n{BODY}',
    "a function as an argument": f'@quantizer("mine", function="f")\n{BODY}',
    "two arguments without names": f'@quantizer("mine", 16)\n{BODY}',
    "two names": f'@quantizer("mine", name="mine")\n{BODY}',
    "no name": f"@quantizer()\n{BODY}",
    "no call": f"@quantizer\n{BODY}",
    "a number as the name": f"@quantizer(3)\n{BODY}",
    "an unhashable name": f"@quantizer([])\n{BODY}",
    "upper case": f'@quantizer("Mine")\n{BODY}',
    "a name that ends a line": f'@quantizer("mine\\n")\n{BODY}',
    "a type of mqo": f'@quantizer("mxfp4")\n{BODY}',
    "a family of types of mqo": f'@quantizer("mixed")\n{BODY}',
    **{f"the reserved name {name}": f'@quantizer("{name}")\n{BODY}' for name in
       ("all", "bf16", "fp16", "fp32", "none", "source", "then", "until")},
    "two of a name": f"{MINE}{MINE}",
    "a block of zero": f'@quantizer("mine", block=0)\n{BODY}',
    "a block of True": f'@quantizer("mine", block=True)\n{BODY}',
    "a multiple of zero": f'@quantizer("mine", multiple=0)\n{BODY}',
    "a multiple of True": f'@quantizer("mine", multiple=True)\n{BODY}',
    "squares without a block": f'@quantizer("mine", square=True)\n{BODY}',
    "a switch that is a number": f'@quantizer("mine", stochastic=1)\n{BODY}',
    "a list of options": f'@quantizer("mine", options=["a"])\n{BODY}',
    "an option without a valid name": f'@quantizer("mine", options={{"a-b": 1}})\n{BODY}',
    "an option that is a list": f'@quantizer("mine", options={{"a": [1]}})\n{BODY}',
    "an option without a value": f'@quantizer("mine", options={{"a": None}})\n{BODY}',
    "an option that is infinite": f'@quantizer("mine", options={{"a": 1e999}})\n{BODY}',
    "an option that is too large": f'@quantizer("mine", options={{"a": {10**20}}})\n{BODY}',
    "an option that cannot be printed": f'@quantizer("mine", options={{"a": "\\x7f"}})\n{BODY}',
    "none at all": "x = 1\n",
    "another decorator": f'@quantize("mine")\n{BODY}',
    "one in a function": "def outer():\n    @quantizer('mine')\n    def mine(x, c): return x\n",
    "one in a class": "class Outer:\n    @quantizer('mine')\n    def mine(x, c): return x\n",
    "one in a branch": "if True:\n    @quantizer('mine')\n    def mine(x, c): return x\n",
    "one that is called": 'mine = quantizer("mine")(lambda x, context: x)\n',
}  # fmt: skip


@pytest.mark.parametrize("text", INVALID.values(), ids=INVALID)
def test_an_invalid_file_is_refused_and_named(write_file, text):
    path = write_file(HEAD + text)
    with pytest.raises(ValueError, match=r"mine\.py"):
        declared(path)
    assert PLUGINS == {}


def test_another_faulty_one_is_refused_with_its_line(write_file):
    path = write_file(f"{HEAD}{MINE}\n@quantizer('none')\n{BODY}")
    with pytest.raises(ValueError, match=r"in line 7 of .*'none'"):
        declared(path)


def pipe(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


def large(path):
    with path.open("w") as file:
        file.truncate(1 << 40)


def missing(path):
    pass


@pytest.mark.parametrize("make", [pipe, endless, large, missing, os.mkdir])
@pytest.mark.parametrize("read", [declared, local_files, digest_of])
def test_only_a_regular_file_of_a_usual_size_is_read(tmp_path, make, read):
    make(tmp_path / "mine.py")
    with pytest.raises(ValueError, match=r"mine\.py"):
        read(tmp_path / "mine.py")


def test_a_file_that_cannot_be_run_is_refused(write_file):
    """Python runs only files with this ending."""
    with pytest.raises(ValueError, match=r"mine\.txt"):
        declared(write_file(HEAD + MINE, "mine.txt"))


def test_reading_runs_neither_the_file_nor_what_it_imports(write_file, tmp_path):
    marker = tmp_path / "it ran"
    run = f"open({str(marker)!r}, 'w')\n"
    write_file(run, "helper.py")
    path = write_file(f"import helper\n{HEAD}{run}{MINE}")
    assert list(declared(path)) == ["mine"]
    assert len(local_files(path)) == 2 and digest_of(path)
    assert not marker.exists()
    assert PLUGINS == {}
