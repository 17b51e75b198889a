"""The options of distillation, post-training quantization and export."""

from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from typing import Any

TEACHER_ARG = "export_kd_teacher_load"
PROMPTS = "The city lies on the river|In the year 1900|The word is used for"
EXPORTS = ("none", "hf", "tensorrt_llm")
_DEFAULT = "(default: %(default)s)"


def add_modelopt_args(parser: ArgumentParser) -> ArgumentParser:
    """Add the --export-kd-* flags; upstream's parser calls this as its `extra_args_provider`."""
    group = parser.add_argument_group(title="knowledge distillation")
    group.add_argument(
        "--export-kd-teacher-load",
        metavar="FOLDER",
        help="the teacher's checkpoints; model_config.yaml there, if any, describes its model",
    )
    group.add_argument(
        "--export-kd-cfg",
        metavar="FILE",
        help="YAML: the compared layers and the weights of losses; default: only the logits",
    )
    group.add_argument(
        "--export-kd-finalize",
        action="store_true",
        help="build only the student, without the modules that its distillation added",
    )
    return parser


def add_ptq_args(parser: ArgumentParser) -> ArgumentParser:
    """Add the options of text_generation_ptq.py: model, format, calibration, export, ranks."""
    add = parser.add_argument
    folder: dict[str, Any] = {"type": Path, "metavar": "FOLDER"}
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    model = "the model: a run, Megatron's checkpoints (torch_dist), or a Hugging Face folder"
    add("--load", required=True, help=model, **folder)
    add("--save", help="new folder for the quantized model's checkpoints", **folder)
    add("--tokenizer-model", help="tokenizer; default: the model's, or the sample's", **folder)
    quantized = "format: int8, fp8, int4_awq, ...; default: the model is already quantized"
    add("--export-quant-cfg", metavar="FORMAT", help=quantized)
    texts = f"calibration text: a .jsonl or text file, or the sample wikipedia or dolma {_DEFAULT}"
    add("--calib-dataset", default="wikipedia", metavar="TEXTS", help=texts)
    add("--calib-size", default=512, help=f"number of calibration samples {_DEFAULT}", **number)
    add("--calib-batch-size", default=4, help=f"calibration batch size {_DEFAULT}", **number)
    length = "tokens per calibration sample; default: 512, or the model's maximum if smaller"
    add("--calib-length", help=length, **number)
    prompts = "prompts to generate from, separated by | (default: three)"
    add("--prompts", default=PROMPTS, metavar="TEXT", help=prompts)
    add("--out-seq-length", default=16, help=f"tokens to generate per prompt {_DEFAULT}", **number)
    unknown = "ignore this argument of the checkpoint, which Megatron does not know; repeatable"
    add("--ignore-argument", action="append", default=[], metavar="NAME", help=unknown)
    add("--decoder", choices=("llama", "deepseek"), help="fail if the model is of another kind")
    ranks = f"tensor-parallel size of the TensorRT-LLM checkpoint {_DEFAULT}"
    add("--inference-tensor-parallel", default=1, help=ranks, **number)
    add("--export-dir", help="new folder for the exported model", **folder)
    add("--export-format", choices=EXPORTS, default="none", help=f"format of it {_DEFAULT}")
    plain = "with hf: write dequantized weights for plain transformers"
    add("--dequantized", action="store_true", help=plain)
    return parser


def positive(text: str) -> int:
    """Parse a positive integer, for argparse."""
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"{text} is not a positive integer")
    return number
