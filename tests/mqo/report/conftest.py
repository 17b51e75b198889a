"""Made-up runs, as `mqo` and the training program leave them, with the numbers a test wants."""

import json
import math

import pytest
from mqo.launch.command import as_shell
from mqo.launch.config import resolve
from mqo.launch.flags import shape_flags
from mqo.report.collect import collect
from mqo.report.compare import compare
from mqo.runs import RunFolder

SHARES = {"bf16": 0.0, "FA_mxfp8": 0.02, "FA_linear_mxfp8": 0.33, "mxfp4": 0.35}
DIFF = """diff --git a/megatron/core/layers.py b/megatron/core/layers.py
--- a/megatron/core/layers.py
+++ b/megatron/core/layers.py
@@ -1,2 +1,3 @@
 y = 1
+custom_quant_type = '{kind}'
-z = 2
+z = 3
diff --git a/megatron/ours.py b/megatron/ours.py
new file mode 100644
--- /dev/null
+++ b/megatron/ours.py
@@ -0,0 +1 @@
+print("<script>alert('not run')</script>")
"""
MARK = {"size": 3, "sha256": "00ff", "mtime_ns": None}


def falling(steps, end, start=8.0):
    """Losses that fall from `start` to `end`."""
    return [end + (start - end) * math.exp(-6 * n / (steps - 1)) for n in range(steps)]


def write(path, table):
    path.write_text(json.dumps(table), encoding="utf-8")


def make_run(root, mode="bf16", *, loss=6.0, valid=None, seed=1234, steps=200, **rest):
    """A run that ended well at these losses; `rest` is what `facts` takes, and flags."""
    folder = RunFolder(root)
    flags = ("--seed", str(seed), "--train-samples", str(4 * steps), *rest.pop("flags", ()))
    options = ("gemms", "attention_gemms", "model", "dataset", "schedule", "data_prefix")
    names = {name: rest.pop(name) for name in options if name in rest}
    model, data = names.pop("model", "llama32-1b"), names.pop("dataset", "wikipedia")
    names["name"], library = rest.pop("called", None), rest.pop("library", None)
    cell = resolve(model, data, mode, "smoke", extra_flags=flags, **names)
    cell = cell.with_library(library) if library else cell
    folder.root.mkdir(parents=True)
    folder.config.write_text(cell.model_dump_json())
    folder.quant_config.write_text(cell.quant_toml(cell.quantization.types or {}))
    facts(folder, cell, **rest)
    losses = falling(steps, loss)
    rows = [(n, "lm loss", value) for n, value in enumerate(losses, 1)]
    rows += [(n, "iteration-time", rest.get("step_s", 0.5)) for n in range(2, steps + 1)]
    rows += [(steps, "lm loss validation", loss if valid is None else valid)]
    rows += [(1, "quant/fprop/layers.0/x/underflow", 0.02)]
    lines = [json.dumps({"iteration": n, "name": name, "value": v}) for n, name, v in rows]
    folder.metrics.write_text("\n".join(lines) + "\n")
    result = {"run": str(root), "iterations": steps, "train_loss": losses[-1], "vocab_size": 4096}
    types = cell.quantization.types | cell.quantization.library_types
    write(folder.result, result | {"valid_loss": loss, "seconds": 9.0, "types": types})
    return folder


IMPLEMENTATION = {"norms": ["torch.RMSNorm"], "optimizers": ["torch.AdamW"], "fusions": []}


def facts(
    folder,
    cell,
    *,
    step_s=0.5,
    memory=2**30,
    share=None,
    digest="00ff",
    cpu="A CPU",
    implementation=IMPLEMENTATION,
):
    """What a run of the cell is told, and what else it leaves."""
    if implementation is not None:  # a run of 0.1 has none
        write(folder.implementation, implementation)
    python = ["/usr/bin/python", "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    program = ["--standalone", str(folder.source / "pretrain_gpt.py")]
    paths = ["--data-path", "/data/d_text", "--tensorboard-dir", str(folder.tensorboard)]
    command = [
        *python,
        *program,
        *shape_flags(cell.experiment),
        *paths,
        *cell.experiment.extra_flags,
    ]
    folder.command.write_text(as_shell(command, {"OMP_NUM_THREADS": "2"}) + "\n")
    inputs = {"files": {"/data/d_text.bin": MARK | {"sha256": digest}}, "iteration": None}
    environment = {"python": "3.11.9 (main)", "cpu": cpu, "cores": 2, "commit": "abc+"}
    environment |= {"packages": {"torch": "2.13.0"}, "inputs": inputs}
    write(folder.environment, environment)
    write(folder.device, {"device": "cpu", "peak_memory": [memory // 2, memory]})
    share = SHARES.get(cell.quantization.mode, 0.1) if share is None else share
    write(folder.coverage, {"quantized_share": share})
    types = {site: kind for site, kind in (cell.quantization.types or {}).items() if kind != "none"}
    stats = {"layer": "layers.0", "operand": "x", "calls": 3, "measured": 1, "sqnr_db": 20.0}
    stats |= {"signal": 100.0, "noise": 1.0}
    write(folder.quant_stats, [stats | {"site": s, "quant_type": t} for s, t in types.items()])
    folder.overlay_diff.write_text(DIFF.format(kind=next(iter(types.values()), "none")))
    info = folder.source / "megatron/core/package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 19\nPATCH = 2\n")


@pytest.fixture
def runs(tmp_path):
    """A folder of runs, and a function that makes one in it."""
    root = tmp_path / "some runs"
    root.mkdir()

    def make(name, *args, **rest):
        return make_run(root / name, *args, **rest)

    make.root = root
    return make


def contrast(one, two):
    """WCAG 2's contrast of two colors #rrggbb, of which it asks 3 for graphics."""
    return (max(luminance(one), luminance(two)) + 0.05) / (
        min(luminance(one), luminance(two)) + 0.05
    )


def luminance(color):
    parts = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def only(runs):
    """The one comparison of the runs."""
    (group,) = compare(collect([runs.root])[0])[0]
    return group


def trio(runs, seed, base, **gaps):
    """bf16 at `base`, and modes at their gaps from it."""
    runs(f"bf16 {seed}", seed=seed, loss=base)
    for mode, gap in gaps.items():
        runs(f"{mode} {seed}", mode, seed=seed, loss=base * (1 + gap))
