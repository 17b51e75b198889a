"""A whole performance test of made-up runs; the programs of the tree do not run."""

import gzip
import json

import pytest
from mqo.launch.machine import Machine
from mqo.launch.variants import variants
from mqo.perf import sections as program
from mqo.perf.comparability import profiler_flags, run_of
from mqo.perf.sections import TRACE, Measured
from mqo.perf.train import PerfOptions, plan

from ..report.conftest import make_run
from .test_trace import STEP

NAMES = ("llama32-1b", *variants("FA_linear_mxfp8"), *variants("bf16"), "wikipedia", "smoke")
ERROR = {"max_ulp": 9.0, "mean_ulp": 1.5, "relative_error": 0.04, "sqnr_db": 27.5}
SITES = [
    {"site": site, "quant_type": kind, "batch": 1, "m": 8, "n": 8, "k": 64, "total": ERROR}
    | {"product": ERROR | {"sqnr_db": "inf"}}
    for site, kind in (("fprop", "mxfp8"), ("dgrad", "none"))
]
COVERAGE = {"flops": 3e9, "micro_batch": 4, "sequence": 256, "parameters": 1 << 20}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A function that makes a whole test: what `rest` says of the mode's runs holds for both."""

    def answer(run, **rest):
        return {"dtype": "fp32", "sites": SITES}

    monkeypatch.setattr(program, "_precision", answer)
    monkeypatch.setattr(program, "_digests", lambda run: {"weight": ["float32", [2], "00ff"]})

    def make(place="a test", scaling=True, asked=None, **rest):
        asked = asked or PerfOptions(*NAMES)
        planned = plan(asked, Machine(4, 0), scaling=scaling)
        folder = tmp_path / place
        runs = {}
        modes = {"baseline": "bf16"} | dict.fromkeys(("mode", "again"), "FA_linear_mxfp8")
        modes |= {one.name: "FA_linear_mxfp8" for one in planned.scaling}
        for name, mode in modes.items():
            flags = profiler_flags(60) if name == "again" else ()
            own = {"step_s": 0.3, "memory": 2**29} if mode == "bf16" else {"loss": 6.01} | rest
            run = make_run(folder / "runs" / name, mode, **({"steps": 60, "flags": flags} | own))
            run.coverage.write_text(json.dumps(COVERAGE | {"quantized_share": 0.3}))
            runs[name] = run_of(run.root)
        (folder / TRACE).write_bytes(gzip.compress(json.dumps({"traceEvents": STEP}).encode()))
        return asked, Measured(planned, runs, folder)

    return make
