"""A comparison as LaTeX."""

import pytest
from mqo.report.collect import collect
from mqo.report.compare import compare
from mqo.report.latex import escape, table


@pytest.fixture
def tex(runs):
    """A function that makes the table of the runs that are there."""

    def make():
        (group,) = compare(collect([runs.root])[0])[0]
        return table(group)

    return make


def rows(text):
    """{variant: its cells}, of the lines between the rules."""
    body = text.partition("\\midrule")[2].partition("\\bottomrule")[0]
    lines = [line.strip().removesuffix(" \\\\").split(" & ") for line in body.strip().splitlines()]
    return {cells[0]: cells[1:] for cells in lines}


def test_each_variant_is_a_row_with_its_interval(runs, tex):
    for seed, gap in ((1, 0.05), (2, 0.07), (3, 0.06)):
        runs(f"bf16 {seed}", loss=6.0, seed=seed)
        runs(f"mxfp4 {seed}", "mxfp4", loss=6.0 + gap, seed=seed)
    found = rows(tex())
    (unquantized,) = [cells for name, cells in found.items() if name != "mxfp4"]
    assert unquantized == ["3", "6.0000", "", "", ""]
    seeds, loss, gap, interval, p = found["mxfp4"]
    assert (seeds, loss, gap, interval) == ("3", "6.0600", "$+1.00$", "$[+0.59, +1.41]$")
    assert 0 < float(p.strip("$")) < 0.05


def test_one_seed_has_a_gap_and_no_interval(runs, tex):
    runs("bf16")
    runs("mxfp4", "mxfp4", loss=6.06)
    assert rows(tex())["mxfp4"] == ["1", "6.0600", "$+1.00$", "", ""]


def test_names_and_signs_are_escaped(runs, tex):
    runs("bf16")
    runs("quantized", "FA_linear_mxfp8", loss=6.0)
    text = tex()
    assert r"FA\_linear\_mxfp8" in rows(text)
    assert r"95\% interval" in text
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a_b", r"a\_b"), ("5 %", r"5 \%"), ("\\", r"\textbackslash{}"), ("{x}", r"\{x\}")],
)
def test_what_latex_reads_as_its_own_is_escaped(text, shown):
    assert escape(text) == shown


def test_the_command_writes_it_when_asked(runs, command_line, tmp_path):
    pytest.importorskip("plotly")
    runs("bf16")
    out = tmp_path / "out"
    command_line("report", str(runs.root), "-o", str(out), "--latex")
    (path,) = out.glob("*.tex")
    assert path.with_suffix(".png").exists()
    command_line("report", str(runs.root), "-o", str(out))
    assert not list(out.glob("*.tex"))
