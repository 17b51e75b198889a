"""Post-training quantization: formats, calibration data, ModelOpt's quantizers, and generation."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from mqo.megatron.run import modelopt
from mqo.megatron.run.errors import PtqError, reading
from mqo.megatron.run.untrusted import Limit, parse_json, read_lines, read_text
from mqo.quant.labels import exempt
from mqo.quant.source import site_types
from rich.progress import track
from torch import Tensor, nn

from .checkpointing import load_modelopt_state

Encode = Callable[[str], list[int]]
OUTPUT_LAYER = "output_layer"
LISTED = 4
# Upstream's arguments for the training data of a model and the sequence length.
TRAINED_ON = (
    *("data_path", "train_data_path", "valid_data_path", "test_data_path", "split"),
    *("data_args_path", "per_split_data_args_path", "seq_length"),
    *("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"),
)
# Where the sites are, below a tree's megatron/core.
SITE_FILES = ("tensor_parallel/layers.py", "transformer/dot_product_attention.py")


@dataclass(frozen=True)
class ModelOptFormat:
    """A configuration of ModelOpt, by its name there.

    A weight's input width must be a multiple of `block` elements; with `rows`, its output width
    must be one, too.
    """

    config: str
    block: int = 1
    rows: bool = False


# The formats that run on a CPU, tried with modelopt 0.47.
FORMATS = {
    "int8": ModelOptFormat("INT8_DEFAULT_CFG"),
    "int8_sq": ModelOptFormat("INT8_SMOOTHQUANT_CFG"),
    "int8_wo": ModelOptFormat("INT8_WEIGHT_ONLY_CFG"),
    "fp8": ModelOptFormat("FP8_DEFAULT_CFG"),
    "fp8_pc_pt": ModelOptFormat("FP8_PER_CHANNEL_PER_TOKEN_CFG"),
    "fp8_blockwise": ModelOptFormat("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", block=128, rows=True),
    "int4": ModelOptFormat("INT4_BLOCKWISE_WEIGHT_ONLY_CFG", block=128),
    "int4_awq": ModelOptFormat("INT4_AWQ_CFG", block=128),
    "w4a8_awq": ModelOptFormat("W4A8_AWQ_BETA_CFG", block=128),
}
CUDA = "ModelOpt has kernels only for CUDA"
ATTENTION = "they quantize Transformer Engine's attention, which is not used here"
REFUSED = {
    **dict.fromkeys(("nvfp4", "nvfp4_awq", "nvfp4_svdquant", "w4a16_nvfp4", "w4a8_nvfp4"), CUDA),
    **dict.fromkeys(("mxfp8", "mxfp6", "mxfp4", "mxint8", "w4a8_mxfp4"), CUDA),
    **dict.fromkeys(("fp8_kv", "nvfp4_kv"), ATTENTION),
}


def format_of(name: str) -> ModelOptFormat:
    """Return the format called `name`.

    Raises:
        PtqError: the format is unknown, or does not run here; the text says why.
    """
    if name in FORMATS:
        return FORMATS[name]
    why = REFUSED.get(name)
    rest = "; ".join(
        f"{reason}: {', '.join(n for n in REFUSED if REFUSED[n] == reason)}"
        for reason in dict.fromkeys(REFUSED.values())
    )
    refusal = f"The format {name} does not run here: {why}" if why else f"Unknown format {name}"
    raise PtqError(refusal, expected=f"one of {', '.join(FORMATS)}", help=rest)


# -- calibration data ------------------------------------------------------------------------------


def read_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a file: `text` of each JSON line (.jsonl), else paragraphs.

    Raises:
        PtqError: the file cannot be read, or a line does not have that form.
    """
    with reading(PtqError):
        if path.suffix != ".jsonl":
            yield from (t for t in read_text(path, Limit.TEXT).split("\n\n") if t.strip())
            return
        for number, line in enumerate(read_lines(path), 1):
            if line.strip():
                yield _text_of(line, f"Line {number} of {path}")


def _text_of(line: bytes, where: str) -> str:
    try:
        text = parse_json(where, line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise PtqError(f"{where} has no text", expected='{"text": "..."}')
    return text


def calibration_samples(
    texts: Iterable[str], encode: Encode, *, samples: int, length: int, vocabulary: int
) -> Tensor:
    """Concatenate the texts' tokens and cut them into samples: token ids [samples, length].

    There is no padding, because it would affect the amax.

    Raises:
        PtqError: the texts are too short for this number of samples, or a token is not in
        `vocabulary`.
    """
    ids: list[int] = []
    for text in texts:
        ids += encode(text)
        if len(ids) >= samples * length:
            break
    if len(ids) < samples * length:
        raise PtqError(
            f"The calibration data has {len(ids)} tokens, {len(ids) // length} samples of {length}",
            expected=f"{samples} samples",
            help="Use more text, or a smaller --calib-size",
        )
    if max(ids) >= vocabulary:
        raise PtqError(
            f"The tokenizer gives token {max(ids)}, but the vocabulary has {vocabulary} tokens",
            expected="the tokenizer that the model was trained with",
            help="Pass it with --tokenizer-model",
        )
    return torch.tensor(ids[: samples * length]).view(samples, length)


# -- quantization ----------------------------------------------------------------------------------


def check_not_quantized(folder: str | Path) -> None:
    """Raise PtqError if the newest checkpoint in `folder` already has ModelOpt's quantizers."""
    modes = [mode for mode, _ in load_modelopt_state(folder).get("modelopt_state_dict", [])]
    if modelopt.QUANTIZE_MODE in modes:
        raise PtqError(
            f"The checkpoint in {folder} is already quantized", expected="an unquantized one"
        )


def check_source(core: Path) -> None:
    """Raise PtqError if the sites in the source below `core` also quantize."""
    for name in SITE_FILES:
        types = {s: t for s, t in site_types(str(core / name)).items() if t != "none"}
        if types:
            raise PtqError(
                f"{name} has {', '.join(f'{s} = {t}' for s, t in types.items())}",
                expected="'none' at every site, because ModelOpt quantizes here",
                help="Run `mqo restore`, then `mqo apply`",
            )


def check_shapes(model: nn.Module, name: str) -> None:
    """Raise PtqError if a layer's widths are not multiples of the format's block."""
    kind = format_of(name)
    wrong = [
        f"{layer} {list(module.weight.shape)}"
        for layer, module in model.named_modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
        and not layer.endswith(OUTPUT_LAYER)
        and any(width % kind.block for width in module.weight.shape[0 if kind.rows else 1 :])
    ]
    if wrong:
        shown = ", ".join(wrong[:LISTED]) + (", ..." if len(wrong) > LISTED else "")
        raise PtqError(
            f"{len(wrong)} layers cannot be divided into blocks of {kind.block}: {shown}",
            expected=f"{'both widths' if kind.rows else 'input widths'} divisible by {kind.block}",
            help="Use a format without blocks: int8, int8_sq, int8_wo, fp8 or fp8_pc_pt",
        )


def quantize(model: nn.Module, name: str, batches: Sequence[Tensor]) -> nn.Module:
    """Insert and calibrate ModelOpt's quantizers of the format `name`; return `model`.

    `batches` are token ids [batch, length]. The output layer, routers and embeddings are not
    quantized. After a failure a global function of ModelOpt stays patched: end the process then.

    Raises:
        PtqError: the model's shapes do not fit the format; ModelOpt cannot quantize it; some layers
            saw no calibration data.
    """
    check_shapes(model, name)
    import modelopt.torch.quantization as mtq

    modelopt.make_portable()
    config: Any = copy.deepcopy(getattr(mtq, format_of(name).config))
    exempt(model).eval()

    def calibrate(module: nn.Module) -> None:
        for batch in track(batches, "calibrating"):
            logits(module, batch)

    try:
        with torch.no_grad():
            mtq.quantize(model, config, calibrate)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, TypeError) as error:
        raise PtqError(
            f"ModelOpt cannot quantize this model as {name}: {str(error).splitlines()[0]}"
        ) from error
    _check_calibrated(model)
    return model


def _check_calibrated(model: nn.Module) -> None:
    from modelopt.torch.quantization.nn import TensorQuantizer

    idle = [
        layer
        for layer, module in model.named_modules()
        if isinstance(module, TensorQuantizer) and module.is_enabled and _lacks_range(module)
    ]
    if idle:
        raise PtqError(
            f"{len(idle)} quantizers saw no finite calibration data: {', '.join(idle[:LISTED])}",
            expected="tokens for each quantizer, including those of experts",
            help="Use more or other data: --calib-size, --calib-dataset",
        )


def _lacks_range(quantizer: Any) -> bool:
    if getattr(quantizer, "_dynamic", False):
        return False
    return quantizer.amax is None or not bool(torch.isfinite(quantizer.amax).all())


# -- inference -------------------------------------------------------------------------------------


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return [batch, length, vocabulary] for tokens [batch, length]."""
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)
    with torch.no_grad():
        return model(tokens, positions, None)


def generate(model: nn.Module, prompt: Sequence[int], count: int, end: int | None) -> list[int]:
    """Return at most `count` tokens after `prompt`, each the most likely; stop after `end`.

    There is no cache: everything is recomputed for each token.
    """
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(model, torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] == end:
            break
    return tokens[len(prompt) :]


def save(model: nn.Module, folder: Path, name: str, trained: Mapping[str, Any]) -> None:
    """Write `model`, in the format `name`, as iteration 1 of the checkpoints in `folder`.

    `trained` are the arguments of its training, if known. Those that name the data are saved with
    the model, so that evaluations before and after use the same held-out text.
    """
    from megatron.training import get_args
    from megatron.training.checkpointing import save_checkpoint

    args = get_args()
    vars(args).update({key: trained[key] for key in TRAINED_ON if trained.get(key) is not None})
    setattr(args, modelopt.QUANTIZED_AS, name)
    args.save, args.verify_integrity = str(folder), True
    save_checkpoint(1, [model], None, None, 0)
