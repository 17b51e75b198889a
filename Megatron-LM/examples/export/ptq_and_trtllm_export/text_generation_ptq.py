"""Quantizes a trained model with ModelOpt, saves it, and exports it for inference.

    .venv/bin/python Megatron-LM/examples/export/ptq_and_trtllm_export/text_generation_ptq.py \\
        --load CHECKPOINTS --save QUANTIZED --export-quant-cfg fp8 --calib-dataset wikipedia

CHECKPOINTS is a folder that Megatron saves to (torch_dist, any parallel layout), a run folder, or a
Hugging Face folder. Without --export-quant-cfg an already quantized model is exported. The outputs
must be new folders, which appear only when they are complete. It runs as one process on the CPU.
The output layer is not quantized.
"""

import argparse
import importlib.util
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(TREE / ".mqo_runtime"), str(TREE), str(TREE / "tools")]

# First, for its check: no other megatron may be imported instead of this tree's.
import preflight  # isort: skip

preflight.check_origin(("megatron.inference",))

import convert as weights
from megatron.inference.arguments import add_ptq_args
from mqo.megatron.run.errors import InferenceError, PtqError

SAMPLES = ("wikipedia", "dolma")
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Source:
    """A checkpoint, the flags that build its model, and the arguments of its training.

    The folder `hf_configs` has the tokenizer and configurations for an export; `config` is its
    config.json.
    """

    checkpoint: str
    flags: list[str]
    arguments: Mapping[str, Any]
    tokenizer: str
    hf_configs: str
    config: Mapping[str, Any]


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    return add_ptq_args(parser).parse_args(argv)


def check_targets(args: argparse.Namespace) -> None:
    """Raise PtqError if outputs are missing, exist already, or contradict other options."""
    if (args.export_format != "none") != (args.export_dir is not None):
        raise PtqError(
            f"--export-format is {args.export_format}, --export-dir {args.export_dir or 'missing'}",
            expected="both options, or neither",
        )
    if args.dequantized and args.export_format != "hf":
        raise PtqError(
            f"--dequantized is set, but --export-format is {args.export_format}",
            expected="--export-format hf with --dequantized",
        )
    if args.save is None and args.export_dir is None:
        raise PtqError("There is nothing to write", expected="--save, --export-dir, or both")
    if args.tokenizer_model and not (args.tokenizer_model / TOKENIZER).is_file():
        raise PtqError(
            f"{args.tokenizer_model} has no {TOKENIZER}", expected="a tokenizer's folder"
        )
    if args.save and args.export_quant_cfg is None:
        raise PtqError(
            "--save without --export-quant-cfg would write the model unchanged",
            expected="--export-quant-cfg FORMAT, or only --export-dir",
        )
    for target in filter(None, (args.save, args.export_dir)):
        if target.exists() or target.is_symlink():
            raise PtqError(f"{target} already exists", expected="a new folder")


def find_source(args: argparse.Namespace, scratch: Path) -> Source:
    """Return the model that `--load` names; convert a Hugging Face folder into `scratch`.

    A separate process does it, because only mqo knows the models' shapes.
    """
    words = ["--tree", TREE, "--load", args.load, "--out", scratch]
    words += ["--tokenizer", args.tokenizer_model] if args.tokenizer_model else []
    words += [f"--ignore-argument={name}" for name in args.ignore_argument]
    if args.calib_dataset in SAMPLES:
        words += ["--sample", find_texts(args).parent / "tokenizer"]
    # The library of the checkout that contains this tree, if it is in one.
    path = os.pathsep.join(filter(None, (str(TREE.parent / "tools"), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-W", "ignore", "-m", "mqo.launch.ptq_source", *map(str, words)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path})
    if done.returncode:
        sys.exit(done.returncode)  # it printed the reason
    return Source(**json.loads((scratch / "source.json").read_text(encoding="utf-8")))


def format_of(source: Source) -> str:
    """Return a checkpoint's format; PtqError if another program quantized it."""
    from mqo.megatron.run.modelopt import QUANTIZED_AS

    name = source.arguments.get(QUANTIZED_AS)
    if name is None:
        raise PtqError(
            f"The checkpoint in {source.checkpoint} was not quantized by this program",
            expected="a checkpoint that it quantized, or --export-quant-cfg FORMAT",
        )
    return name


def find_texts(args: argparse.Namespace) -> Path:
    """Return the path of the calibration texts."""
    if args.calib_dataset in SAMPLES:
        return TREE.parent / "data" / args.calib_dataset / "text.jsonl"
    return Path(args.calib_dataset)


def show(title: str, model: Any, tokenizer: Any, args: argparse.Namespace) -> None:
    """Print the model's continuation of each prompt."""
    from megatron.inference import ptq

    print(f"-- {title}")
    for prompt in args.prompts.split("|"):
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        tokens = ptq.generate(model, ids, args.out_seq_length, tokenizer.eos_token_id)
        print(f"{prompt!r} -> {tokenizer.decode(tokens)!r}", flush=True)


def calibration(args: argparse.Namespace, source: Source, tokenizer: Any) -> Any:
    """Return the calibration data: batches of token ids."""
    from megatron.inference import ptq

    samples = ptq.calibration_samples(
        ptq.read_texts(find_texts(args)),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        samples=args.calib_size,
        length=min(args.calib_length or 512, source.config["max_position_embeddings"]),
        vocabulary=source.config["vocab_size"],
    )
    return samples.split(args.calib_batch_size)


def write(args: argparse.Namespace, source: Source, model: Any) -> None:
    """Write the checkpoint and the export; write neither if one fails."""
    from megatron.inference import export, ptq

    core = weights.unwrapped(model)
    with ExitStack() as stack:
        if args.save:
            folder = stack.enter_context(staged(args.save))
            # The arguments of the training, but the tokenizer of the calibration.
            mine = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": source.tokenizer}
            ptq.save(model, folder, args.export_quant_cfg, {**source.arguments, **mine})
        if args.export_format == "none":
            return
        folder = stack.enter_context(staged(args.export_dir))
        if args.export_format == "tensorrt_llm":
            ranks = args.inference_tensor_parallel
            export.export_tensorrt_llm(core, folder, ranks, source.config["rope_scaling"])
            return
        shutil.copytree(source.hf_configs, folder, dirs_exist_ok=True)
        (export.export_dequantized if args.dequantized else export.export_hf)(core, folder)


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield a folder next to `target`; rename it to `target` on success."""
    from mqo.megatron.run import disk

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        stage = Path(folder) / target.name
        stage.mkdir()
        try:
            yield stage
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # CheckpointException, of torch, is not an Exception
            if full := disk.full_text(target.parent, error):
                raise PtqError(
                    full,
                    expected="enough space for the output",
                    help="Free some space, or use a folder on another disk",
                ) from error
            raise
        readable = stage.stat().st_mode & 0o666
        for path in stage.rglob("*"):
            if path.is_file():
                path.chmod(readable)  # safetensors' files are readable only by their owner
        stage.rename(target)


def quiet() -> AbstractContextManager[object]:
    """Keep upstream from listing its arguments."""
    return redirect_stdout(io.StringIO())


def quantize(args: argparse.Namespace, scratch: Path) -> None:
    """Quantize and export; the cheap checks run first."""
    check_targets(args)
    source = find_source(args, scratch)
    if importlib.util.find_spec("modelopt") is None:
        raise PtqError("nvidia-modelopt is not installed", expected="the extra `modelopt`")
    with quiet():
        from megatron.inference import export, ptq
        from mqo.megatron.run.errors import building_tokenizer, reading
        from mqo.megatron.run.foreign_tokenizer import check_tokenizer
        from transformers import AutoTokenizer

    wanted = args.export_quant_cfg
    name = wanted or format_of(source)
    ptq.check_source(TREE / "megatron/core")
    ptq.format_of(name)
    target = export.DEQUANTIZED if args.dequantized else args.export_format
    export.check(target, name, args.decoder, "--multi-latent-attention" in source.flags)
    with reading(PtqError):
        check_tokenizer(Path(source.tokenizer))
    with building_tokenizer(source.tokenizer, PtqError):
        tokenizer = AutoTokenizer.from_pretrained(source.tokenizer, trust_remote_code=False)
    if wanted:
        batches = calibration(args, source, tokenizer)
        ptq.check_not_quantized(source.checkpoint)
    with quiet():
        _, model = weights.load([*source.flags, "--load", source.checkpoint])
    core = weights.unwrapped(model).eval()
    show("before" if wanted else f"as {name}", core, tokenizer, args)
    if wanted:
        started = time.monotonic()
        ptq.quantize(core, name, batches)
        print(f"calibrated in {time.monotonic() - started:.1f} s", flush=True)
        show(f"after, as {name}", core, tokenizer, args)
    with quiet():
        write(args, source, model)
    for target in filter(None, (args.save, args.export_dir)):
        print(f"written: {target}")
    if args.export_format == "hf" and not args.dequantized:
        print(f"note: {export.advice(name)}")


def main(argv: list[str]) -> None:
    """Run the program; a user-correctable error prints one paragraph and exits with code 2."""
    args = parse_args(argv)
    # A signal must not leave partial output.
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, lambda number, _: sys.exit(128 + number))
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    # Upstream, torch and ModelOpt warn about every package that is not installed.
    logging.disable(logging.WARNING)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    weights.use_cpu()
    with tempfile.TemporaryDirectory(prefix="mqo-ptq-") as scratch:
        from mqo.megatron.run.unpickle import CheckpointError

        try:
            quantize(args, Path(scratch))
        except (InferenceError, CheckpointError) as error:
            print(f"text_generation_ptq.py: {error}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
