"""What each format of post-training quantization costs: loss, size and time, as a markdown table.

    .venv/bin/python benchmarks/ptq.py MODEL [--formats fp8 int4_awq] [--tokens N] [--also RUN...]

MODEL is a run, or a Hugging Face folder. Each format is calibrated on the `dolma` sample (of a run:
on the sample that it was trained on), exported, and evaluated: a run on its validation split,
another model on the `wikipedia` sample. `--also` are runs that trained on with a quantized model.
Sizes are those of the exported safetensors.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mqo.launch import convert, evaluation
from mqo.launch.evaluation import Place, evaluate
from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.runs import RunFolder, checkpoints_of

PROJECT = Project.here()
PROGRAM = PROJECT.tree / "examples/export/ptq_and_trtllm_export/text_generation_ptq.py"
FORMATS = ("int8_wo", "int8", "int8_sq", "fp8", "fp8_pc_pt", "fp8_blockwise")
FORMATS += ("int4", "int4_awq", "w4a8_awq")
NOT_EXPORTED = ("fp8_blockwise",)


@dataclass(frozen=True)
class Subject:
    """A model, its tokenizer, what it is calibrated on, and what is evaluated."""

    model: Path
    tokenizer: Path
    data: str
    text: list[str]


def main() -> None:
    """Print a row a format."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--also", type=Path, nargs="+", default=[])
    given = parser.parse_args()
    print("| format | loss | difference | perplexity | size, MB | calibration, s |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="mqo-ptq-benchmark-") as name:
        folder = Path(name)
        subject = subject_of(given, folder)
        base = loss(plain(subject, folder), subject.text)
        row("none", base, base, megabytes(folder / "none-hf", subject.model))
        for kind in given.formats:
            seconds = quantize(subject, kind, folder, given.samples, given.length)
            size = megabytes(folder / f"{kind}-hf")
            row(kind, loss(folder / kind, subject.text), base, size, seconds)
        for run in given.also:
            row(run.name, loss(run, subject.text), base, None)


def subject_of(given: argparse.Namespace, folder: Path) -> Subject:
    """Return what the command line says of the model."""
    run = RunFolder(given.model)
    if run.config.is_file():
        data = run.read_config()["experiment"]["dataset"]["name"]
        tokenizer = PROJECT.data / data / "tokenizer"
        return Subject(given.model, tokenizer, data, evaluation.text(tokens=given.tokens))
    file = folder / "text.txt"
    lines = (PROJECT.data / "wikipedia/text.jsonl").read_text(encoding="utf-8").splitlines()
    file.write_text("\n\n".join(json.loads(line)["text"] for line in lines), encoding="utf-8")
    text = evaluation.text(file=file, tokenizer=given.model, tokens=given.tokens)
    return Subject(given.model, given.model, "dolma", text)


def plain(subject: Subject, folder: Path) -> Path:
    """Return the model's checkpoints as they are; of a run the weights are exported, too."""
    if (subject.model / "config.json").is_file():
        convert.hf_to_megatron(PROJECT.tree, subject.model, folder / "none")
        return folder / "none"
    convert.megatron_to_hf(PROJECT.tree, checkpoints_of(subject.model), folder / "none-hf")
    return subject.model


def quantize(subject: Subject, kind: str, folder: Path, samples: int, length: int) -> float:
    """Write checkpoint and export of a format; the seconds that the program took to calibrate."""
    words = ["--load", subject.model, "--save", folder / kind, "--export-quant-cfg", kind]
    words += ["--tokenizer-model", subject.tokenizer, "--calib-dataset", subject.data]
    words += ["--calib-size", samples, "--calib-length", length, "--out-seq-length", 1]
    if kind not in NOT_EXPORTED:
        words += ["--export-dir", folder / f"{kind}-hf", "--export-format", "hf"]
    command = [sys.executable, "-W", "ignore", PROGRAM, *words]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    found = re.search(r"calibrated in ([\d.]+) s", done.stdout)
    assert found, done.stdout
    return float(found[1])


def loss(checkpoint: Path, text: list[str]) -> float:
    """Return the loss in nats per token, in the types that the checkpoint itself has."""
    (found,) = evaluate(Tree(PROJECT.tree), [Place.of(checkpoint)], ["bf16"], text)
    return found.loss


def megabytes(*folders: Path) -> float | None:
    """Return the size of the safetensors of the first folder that has some."""
    sizes = [sum(file.stat().st_size for file in f.glob("*.safetensors")) for f in folders]
    return next((size / 1e6 for size in sizes if size), None)


def row(
    name: str, found: float, base: float, size: float | None, seconds: float | None = None
) -> None:
    """Print it."""
    apart = "" if name == "none" else f"{found - base:+.4f}"
    cells = [name, f"{found:.4f}", apart, f"{math.exp(found):.4g}"]
    cells += [f"{size:.1f}" if size else "-", f"{seconds:.1f}" if seconds else "-"]
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
