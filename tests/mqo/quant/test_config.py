"""The options file: defaults, reading once, and errors that name file, key and valid values."""

import re

import pytest
import torch
from mqo.quant import config
from mqo.quant.backend import fake_quantize
from mqo.quant.formats import SITES
from mqo.quant.plugin_context import QuantizerError
from mqo.quant.plugins import PLUGINS
from mqo.quant.quant_config import QuantConfig
from mqo.quant.spec import QuantSpec

FULL = """
[asked]
fprop = "mxfp8"
qk = "none"

[quantizer]
block = 64
scale_rule = "even"
rounding = "stochastic"
overflow = "inf"
tensor_scale = true
seed = 1234

[layers]
exclude = ["output_layer", "qk:decoder.layers.0.*"]

[record]
every = 0
dump = [1, 100]
"""


def test_without_a_file_the_defaults_hold():
    assert config.current() == QuantConfig(
        asked={},
        block=None,
        scale_rule="floor",
        rounding=None,
        overflow="saturate",
        tensor_scale=False,
        seed=0,
        every=50,
        dump=(),
    )


def test_every_key_of_the_file_is_read(options):
    options(FULL)
    assert config.current() == QuantConfig(
        asked={"fprop": "mxfp8", "qk": "none"},
        block=64,
        scale_rule="even",
        rounding="stochastic",
        overflow="inf",
        tensor_scale=True,
        seed=1234,
        every=0,
        dump=(1, 100),
        exclude=("output_layer", "qk:decoder.layers.0.*"),
    )


def test_keys_left_out_keep_their_defaults(options):
    options('[quantizer]\nscale_rule = "rceil"\n')
    assert config.current() == QuantConfig(scale_rule="rceil")


def test_the_file_is_read_once_until_reset(options):
    path = options("[quantizer]\nblock = 16\n")
    assert config.current().block == 16
    path.write_text("[quantizer]\nblock = 128\n", encoding="utf-8")
    assert config.current().block == 16
    config.reset()
    assert config.current().block == 128


def test_the_options_make_the_spec_of_each_type(options):
    assert config.current().spec("hifp8") == QuantSpec("hifp8")
    options(FULL)
    expected = {"block": 64, "scale_rule": "even", "rounding": "stochastic", "overflow": "inf"}
    assert config.current().spec("mxfp4") == QuantSpec("mxfp4", tensor_scale=True, **expected)


def test_a_spec_is_made_once_until_reset(options):
    path = options("[quantizer]\nblock = 16\n")
    place = ("fprop", "x", "a", "mxfp8")
    assert config.current().operand_spec(*place) is config.current().operand_spec(*place)
    path.write_text("[quantizer]\nblock = 128\n", encoding="utf-8")
    config.reset()
    assert config.current().operand_spec(*place).spec.block == 128


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "[quantize]\nblock = 32",
            "unknown table 'quantize'; valid: quantizer, layers, record, run, asked, schedule",
        ),
        ("quantizer = 3", "quantizer = 3 should be a table, [quantizer]"),
        ("[quantizer]\nblok = 32", "[quantizer] 'blok'; valid: block, scale_rule, rounding, "),
        ("[quantizer]\nblock = 33", "[quantizer] block: unknown block 33; valid: 16, 32, 64"),
        ("[quantizer]\nblock = 32.0", "[quantizer] block: unknown block 32.0"),
        ("[quantizer]\nseed = -1", "[quantizer] seed: invalid seed -1; valid: "),
        ("[quantizer]\nseed = true", "[quantizer] seed: invalid seed True; valid: "),
        ("[record]\nevery = -1", "[record] every: invalid number -1; valid: 0, 1, 2"),
        ("[record]\nevery = true", "[record] every: invalid number True; valid: 0, 1, 2"),
        ("[record]\nevery = 1.5", "[record] every: invalid number 1.5; valid: 0, 1, 2"),
        ("[asked]\nlinear = 'mxfp8'", "'linear'; valid: fprop, dgrad, wgrad, qk, pv"),
        ("[asked]\nqk = 'fp8'", "[asked] qk: unknown quant type 'fp8'; valid: none, mxfp8"),
        ("[record]\ndump = 3", "[record] dump: invalid iterations 3; valid: "),
        ("[record]\ndump = [0]", "[record] dump: invalid iterations [0]; valid: "),
        ("[layers]\nexclude = 'output_layer'", "[layers] exclude: 'output_layer' is not a list"),
        ("[layers]\nexclude = ['']", "[layers] exclude: [''] is not a list"),
        (
            "[layers]\nexclude = ['qk:']",
            "[layers] exclude: 'qk:' does not name a layer; valid: SITE:",
        ),
        ("[layers]\nexclude = ['mlp:*']", f"'mlp'; valid: {', '.join(SITES)}, linear"),
        ("[layers]\nexcludes = []", "[layers] 'excludes'; valid: exclude"),
        ("[asked\n", "Expected"),
    ],
)
def test_a_fault_names_file_key_and_valid_values(options, text, complaint):
    path = options(text)
    with pytest.raises(ValueError, match=re.escape(complaint)) as fault:
        config.current()
    assert str(fault.value).startswith(f"{path}: ")


def test_a_named_file_must_exist(monkeypatch, tmp_path):
    monkeypatch.setenv(config.ENVIRONMENT_VARIABLE, str(tmp_path / "absent.toml"))
    with pytest.raises(FileNotFoundError, match=r"absent\.toml"):
        config.current()


# -- custom quantizers ------------------------------------------------------------------------

MINE = """
from mqo.quant import quantizer


@quantizer("mine", stochastic=True, options={"gain": 2.0})
def mine(x, context):
    return x * context.options["gain"]
"""
ROWS = """
[asked]
fprop = "mine"
qk = "none"

[schedule]
qk = "none until 5, then mine"

[[rules]]
layers = "linear:a"
quant_type = "mine"

[operands]
"dgrad.grad" = { quant_type = "mine" }

[plugins.mine]
file = "plugins/mine.py"
digest = "00ff"
declared = { stochastic = true, options = { gain = 2.0 } }
options = { gain = 3 }
"""


@pytest.fixture
def mine(tmp_path):
    """The file of the quantizer, where quant.toml names it."""
    path = tmp_path / "plugins" / "mine.py"
    path.parent.mkdir()
    path.write_text(MINE, encoding="utf-8")
    return path


def test_the_quantizers_of_the_file_are_types_in_all_of_its_tables():
    """Whatever their order, and without the file of the function."""
    read = config.parse(ROWS)
    assert read.own_types() == {"mine"} and read.is_random
    assert dict(read.operand_spec("fprop", "x", "a", "mine").spec.options) == {"gain": 3.0}
    assert dict(read.spec("mine").options) == {"gain": 3.0}
    assert PLUGINS["mine"].function is None
    with pytest.raises(ValueError, match="'mine'"):
        PLUGINS.clear()
        config.parse(ROWS.partition("[plugins.mine]")[0])


def test_a_process_of_a_run_runs_the_files_of_its_quantizers(options, mine):
    options(ROWS)
    spec = config.current().spec("mine")
    assert fake_quantize(torch.ones(4), spec, seed=0).eq(3).all()


def test_rows_without_a_file_run_nothing(options, mine):
    mine.write_text("raise RuntimeError\n")
    options(ROWS.replace('file = "plugins/mine.py"\n', ""))
    assert config.current().own_types() == {"mine"}
    assert PLUGINS["mine"].function is None


def test_reading_the_file_of_a_run_does_not_run_its_quantizers(options, mine, tmp_path):
    """Only the run's own process runs them."""
    mine.write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\n")
    read = config.load(options(ROWS))
    assert read.plugins["mine"].file == "plugins/mine.py"
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stochastic=True", "stochastic=False"),
        ("2.0}", "2.5}"),
        ('quantizer("mine"', 'quantizer("other"'),
        ("from mqo.quant import quantizer", "raise RuntimeError"),
    ],
)
def test_a_file_that_is_not_the_declared_one_is_refused(options, mine, old, new):
    assert old in MINE
    mine.write_text(MINE.replace(old, new), encoding="utf-8")
    options(ROWS)
    with pytest.raises(QuantizerError, match=r"mine\.py"):
        config.current()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("plugins = 3", "plugins = 3 should be a table"),
        ("[plugins]\nmine = 3", "plugins.mine = 3 should be a table"),
        ("[plugins.mine]\npath = 'a.py'", "valid: file, digest, declared, options"),
        ("[plugins.mine]\nfile = '/mine.py'", "'/mine.py'"),
        ("[plugins.mine]\nfile = '../mine.py'", "'../mine.py'"),
        ("[plugins.mxfp8]", "'mxfp8'"),
        ("[plugins.mine]\ndeclared = { blok = 16 }", "mine"),
        ("[plugins.mine]\noptions = { gain = 1.0 }", "'gain' of mine"),
        ("[plugins.mine]\nfile = 3", "file 3 of mine"),
        ("[plugins.mine]\ndigest = 3", "digest 3 of mine"),
        ("[plugins.mine]\ndeclared = 3", "declared 3 of mine"),
        ("[plugins.mine]\noptions = 3", "options 3 of mine"),
    ],
)
def test_a_faulty_row_is_refused(options, text, complaint):
    path = options(text)
    with pytest.raises(ValueError, match=re.escape(complaint)) as fault:
        config.current()
    assert str(fault.value).startswith(f"{path}: ")
