"""Check a custom quantizer: what it must return, and what it declares."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path

import torch
from torch import Tensor

from mqo.quant.backend import DTYPES, fake_quantize
from mqo.quant.comparison import Comparison, compare_formats
from mqo.quant.formats import FORMATS, check_choice
from mqo.quant.operand_table import OPERANDS
from mqo.quant.plugin_calls import call
from mqo.quant.plugin_context import CallSite, QuantizerError
from mqo.quant.plugin_file import load_quantizers
from mqo.quant.plugin_gradients import estimated
from mqo.quant.plugin_modules import local_files
from mqo.quant.plugin_source import declared
from mqo.quant.plugin_states import PluginStates
from mqo.quant.plugins import PLUGINS, Plugin
from mqo.quant.spec import QuantSpec
from mqo.quant.tensor_amax import largest

_SHAPES = ((48, 160), (3, 5), (1, 1), (0, 32), (4, 6, 40))
_OPERAND = ("fprop", "linear", "x")
_KEYS = [(site, "linear", operand) for site, operand in (o.split(".") for o in OPERANDS)]
_BLOCKS = 64  # of a row
_SEEDS = 256
_LARGEST_Z = 5.0  # for a mean of many draws: by chance once in two million checks
_TIMED = 1024  # rows
_REPEATS = 3


@dataclass(frozen=True)
class Finding:
    """The result of one check; `fault` is '' if the quantizer passed, None if it is not for it."""

    check: str
    fault: str | None = ""

    def __str__(self) -> str:
        result = "not declared" if self.fault is None else self.fault or "ok"
        return f"{self.check:52}{result}"


@dataclass(frozen=True)
class QuantizerReport:
    """What `check_quantizer` found; `print` shows it as tables.

    `comparisons` are the errors of the quantizer and of all formats for {name of data: tensor};
    `ms_per_mb` is the time for a float32 tensor of 4 MiB, in ms per MiB.
    """

    name: str
    findings: tuple[Finding, ...]
    comparisons: dict[str, Comparison]
    ms_per_mb: float

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not any(finding.fault for finding in self.findings)

    def __str__(self) -> str:
        lines = [f"quantizer {self.name}", *map(str, self.findings)]
        lines += ["", f"{'SQNR in dB':17}" + "".join(f"{name:>12}" for name in self.comparisons)]
        rows = zip(*(comparison.errors for comparison in self.comparisons.values()), strict=True)
        for row in rows:
            cells = (f"{error.measurement.sqnr_db or 0.0:12.2f}" for error in row)
            lines.append(f"{row[0].spec.quant_type:17}" + "".join(cells))
        lines += ["", f"{self.ms_per_mb:.1f} ms per MiB of float32"]
        failed = [finding.check for finding in self.findings if finding.fault]
        return "\n".join([*lines, *(f"failed: {check}" for check in failed)])


def check_file(file: Path) -> list[QuantizerReport]:
    """Run a file, and check its quantizers, and that a run would read the same from its text.

    Raises:
        FileNotFoundError: the file does not exist.
        QuantizerError: the file cannot be run, a quantizer fails on some tensor, or the text has
            one that the file does not register.
    """
    names, fault = load_quantizers(file), ""
    plugins = [PLUGINS[name] for name in names]
    read: dict[str, Plugin] = {}
    try:
        read = declared(file)
        local_files(file)
    except ValueError as error:
        fault = f"a run would refuse the file: {error}"
    if others := read.keys() - names:
        raise QuantizerError(
            f"{file} does not register {', '.join(sorted(others))}, which its text declares; valid:"
            " @quantizer of mqo.quant"
        )
    reports = []
    for plugin in plugins:
        finding = Finding("a run reads what it declares", fault or _read_fault(plugin, read))
        report = check_quantizer(plugin.name)
        reports.append(replace(report, findings=(finding, *report.findings)))
    return reports


def _read_fault(plugin: Plugin, read: Mapping[str, Plugin]) -> str:
    """Return the difference between a quantizer and what the text of its file declares, or ''."""
    refusal = "a run would refuse the file: the text has "
    if plugin.name not in read:
        return f"{refusal}no @quantizer('{plugin.name}') at its top level"
    texts, registered = read[plugin.name].declaration, plugin.declaration
    differing = {key for key in texts | registered if texts.get(key) != registered.get(key)}
    return f"{refusal}another {', '.join(sorted(differing))}" if differing else ""


def check_quantizer(name: str) -> QuantizerReport:
    """Check the quantizer with that name, compare it with all formats, and measure its time.

    Raises:
        ValueError: there is no such quantizer.
        QuantizerError: it fails on some tensor.
    """
    check_choice("quantizer", name, tuple(PLUGINS))
    plugin = PLUGINS[name]
    findings = tuple(Finding(text, check(plugin)) for text, check in _CHECKS.items())
    seed = 0 if plugin.stochastic else None
    own, width = QuantSpec(name), _width(plugin, 512)
    comparisons = {
        data: compare_formats(x, [own, *FORMATS], seed=seed) for data, x in _data(width).items()
    }
    return QuantizerReport(name, findings, comparisons, _time(own, seed, _width(plugin, 1024)))


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _data(width: int) -> dict[str, Tensor]:
    """Return samples, [256, width]: of distributions, with outlier channels, and of small values.

    Scales of few exponents, such as E4M3, underflow for the last one if they are not relative to
    the tensor's.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        normal = torch.randn(256, width)
        laplace = torch.distributions.Laplace(0.0, 1.0).sample(normal.shape)
        student = torch.distributions.StudentT(3.0).sample(normal.shape)
    outliers = normal * torch.where(torch.arange(width) % 64 == 0, 50.0, 1.0)
    samples = {"N(0, 1)": normal, "Laplace": laplace, "t(3)": student, "outliers": outliers}
    return samples | {"N(0, 1)/1e5": normal / 1e5}


def _rounded(plugin: Plugin, x: Tensor, tile: str = "row", seed: int = 1) -> Tensor:
    return fake_quantize(x, QuantSpec(plugin.name, tile=tile), seed=seed)


def _width(plugin: Plugin, size: int) -> int:
    """Return the smallest number of elements of a row, at least `size`, that is accepted."""
    return size + -size % plugin.multiple


def _shapes(plugin: Plugin) -> list[tuple[int, ...]]:
    return [(*rows, _width(plugin, size)) for *rows, size in _SHAPES]


def _tiles(plugin: Plugin) -> tuple[str, ...]:
    return ("row", "square") if plugin.square else ("row",)


# -- checks: each returns a fault, '', or None if it does not apply -------------------------------


def _shapes_and_dtypes(plugin: Plugin) -> str:
    for tile in _tiles(plugin):
        for shape in _shapes(plugin):
            for dtype in DTYPES:
                x = _normal(*shape).to(dtype)
                result = _rounded(plugin, x, tile)
                if (result.shape, result.dtype) != (x.shape, x.dtype):
                    return f"{list(shape)} {dtype} became {list(result.shape)} {result.dtype}"
    return ""


def _zeros(plugin: Plugin) -> str:
    for tile in _tiles(plugin):
        result = _rounded(plugin, torch.zeros(32, _width(plugin, 64)), tile)
        if (others := result[result != 0]).numel():
            return f"{others[0].item():g} with {tile} tiles"
    return ""


def _extremes(plugin: Plugin) -> str:
    for scale in (1e-40, 1e-30, 1e30):
        for tile in _tiles(plugin):
            if not _rounded(plugin, scale * _normal(32, _width(plugin, 64)), tile).isfinite().all():
                return f"not at {scale:g} with {tile} tiles"
    return ""


def _not_finite(plugin: Plugin) -> str:
    x = _normal(64, _width(plugin, 1024))  # some pieces have neither
    x[0, 0], x[1, 1] = torch.nan, torch.inf
    with torch.inference_mode():
        _rounded(plugin, x)
    return ""


def _rounds(plugin: Plugin) -> str:
    x, seed = _normal(48, _width(plugin, 160)), 1 if plugin.stochastic else None
    for key in (("", "", ""), *_KEYS):  # it may round only some operands
        rounded = call(x, QuantSpec(plugin.name), 1, seed, None, CallSite(key))
        if not rounded.value().equal(x):
            return ""
    return "no operand changes"


def _repeated(plugin: Plugin) -> str:
    x = _normal(48, _width(plugin, 160))
    return "" if _rounded(plugin, x).equal(_rounded(plugin, x)) else "they differ"


def _idempotence(plugin: Plugin) -> str | None:
    if plugin.stochastic or plugin.terms > 1 or not plugin.idempotent:
        return None
    x = _normal(64, _width(plugin, 160))
    spec = QuantSpec(plugin.name)
    once = fake_quantize(x, spec, amax=largest(x))
    changed = (fake_quantize(once, spec, amax=largest(x)) != once).float().mean().item()
    return f"{changed:.2%} of the elements change" if changed else ""


def _bias(plugin: Plugin) -> str | None:
    if not plugin.stochastic:
        return None
    x = torch.rand(8, _width(plugin, 64), generator=torch.Generator().manual_seed(0)) - 0.5
    x[:, ::8] = 1.0  # the amax of each block: the others do not saturate
    x = torch.cat([x, -x])  # nor does their difference from a mean over rows, which is 0
    results = torch.stack([_rounded(plugin, x, seed=seed) for seed in range(_SEEDS)]).double()
    deviation = results.std(0)
    inner = deviation > 0
    if not inner.any():
        return ""
    errors = ((results - x) / deviation)[:, inner]
    # Toward +Inf, and away from zero, one sum per seed: the elements may share random numbers.
    sums = [errors.sum(1), (errors * x[inner].sign()).sum(1)]
    largest_z = max(abs(s.mean() / (s.std() / _SEEDS**0.5)).item() for s in sums)
    return f"z = {largest_z:.1f} over {_SEEDS} seeds" if largest_z > _LARGEST_Z else ""


def _rows(plugin: Plugin) -> str | None:
    if not plugin.independent_rows:
        return None
    x = _normal(48, _width(plugin, 160))
    spec = QuantSpec(plugin.name)
    whole = fake_quantize(x, spec, amax=largest(x), seed=1)
    # With the same random numbers: an element's depends on its index.
    part = fake_quantize(x[:7].contiguous(), spec, amax=largest(x), seed=1)
    return "" if part.equal(whole[:7]) else "a part of the rows has other values"


def _blocks(plugin: Plugin) -> str | None:
    if plugin.block is None:
        return None
    # In one row, half of the blocks have the same random numbers.
    rows, blocks = (1, _BLOCKS) if plugin.stochastic else (48, 4)
    x = _normal(rows, blocks * lcm(plugin.block, plugin.multiple))
    spec = QuantSpec(plugin.name)
    whole = fake_quantize(x, spec, amax=largest(x), seed=1)
    half = fake_quantize(x[:, : x.shape[1] // 2].contiguous(), spec, amax=largest(x), seed=1)
    return "" if half.equal(whole[:, : half.shape[1]]) else "tensor parallelism would change values"


def _next_state(plugin: Plugin) -> str | None:
    if not plugin.state:
        return None
    states, seed = PluginStates(), 1 if plugin.stochastic else None
    spec, options = QuantSpec(plugin.name), {plugin.name: plugin.options}
    try:
        for step in range(2):  # with the initial state, and with the next one
            call(
                _normal(48, _width(plugin, 160)),
                spec,
                1,
                seed,
                None,
                CallSite(_OPERAND, step, states),
            )
            states.end_step(step + 1, options)
    except ValueError as error:
        return str(error)
    return ""


def _gradients(plugin: Plugin) -> str | None:
    if not plugin.estimator:
        return None
    for tile in _tiles(plugin):
        for shape in _shapes(plugin):
            x, spec = _normal(*shape), QuantSpec(plugin.name, tile=tile)
            grad = x.flip(-1) / 8
            result = estimated(grad, x, spec, x.dim() - 1, CallSite(_OPERAND))
            if not result.isfinite().all():
                return f"not for {list(shape)} with {tile} tiles"
    return ""


_CHECKS: dict[str, Callable[[Plugin], str | None]] = {
    "shapes and dtypes stay": _shapes_and_dtypes,
    "normal numbers are rounded": _rounds,
    "zeros stay zero": _zeros,
    "finite values stay finite, from 1e-40 to 1e30": _extremes,
    "NaN and Inf raise no error": _not_finite,
    "equal calls return equal values": _repeated,
    "a second rounding to nearest changes nothing": _idempotence,
    "stochastic rounding is unbiased": _bias,
    "rows are independent": _rows,
    "blocks are independent": _blocks,
    "the next state has the declared names and shapes": _next_state,
    "gradients of the estimator are finite": _gradients,
}


def _time(spec: QuantSpec, seed: int | None, width: int) -> float:
    """Return the time per MiB in ms, the shortest of several calls."""
    x = _normal(_TIMED, width)
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        fake_quantize(x, spec, seed=seed)
        times.append(time.perf_counter() - began)
    return 1e3 * min(times) / (x.nbytes / 2**20)
