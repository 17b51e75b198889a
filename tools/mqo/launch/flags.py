"""Build upstream's flags for a run, grouped by subject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mqo.data.pair_check import document_count
from mqo.data.tokenizer import DEFAULT_VOCAB_SIZE
from mqo.launch import engine
from mqo.launch.architecture import architecture_flags, words_of
from mqo.launch.command import flag_table, read_flags
from mqo.launch.config import Experiment, RunConfig
from mqo.launch.machine import Machine
from mqo.launch.naming import data_file
from mqo.matrix.tables import NONE, Training
from mqo.runs import RunFolder, checkpoints_of

# These fusions need Transformer Engine or apex, which the local implementation does without.
_LOCAL = [
    "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion",
]
HASHED = "torch_dist"  # the only format of checkpoints that upstream hashes
# Turns off apex's kernel that adds weight gradients to those of earlier micro-batches.
_NO_ACCUMULATION = "--no-gradient-accumulation-fusion"
_UNFUSED = ("--no-bias-swiglu-fusion", "--no-bias-dropout-fusion")
# What --no-fusions turns off: all fusions that a run may use on a GPU and that touch no site.
NO_FUSIONS = (_NO_ACCUMULATION, *_UNFUSED)
_ON_CPU = [
    "--distributed-backend gloo --use-cpu-initialization",
    *_UNFUSED,
    "--num-workers 0",
]
_ON_CUDA = ["--distributed-backend nccl"]
DTYPES = {"fp32": [], "bf16": ["--bf16"], "fp16": ["--fp16"]}


@dataclass(frozen=True)
class RunData:
    """Values of `--tokenizer-model` and `--data-path`, and the vocabulary's size if known."""

    tokenizer: Path
    prefix: Path
    vocab_size: int | None

    @classmethod
    def given(cls, experiment: Experiment) -> RunData | None:
        """Return the user's own data; None for the dataset's sample."""
        given = flag_table(experiment.extra_flags)
        tokenizer = experiment.tokenizer or given.get("--tokenizer-model")
        prefix = experiment.data_prefix or data_file(experiment.extra_flags)
        if tokenizer is None or prefix is None:
            return None
        return cls(Path(tokenizer).resolve(), Path(prefix).resolve(), None)


def megatron_flags(
    config: RunConfig, machine: Machine, data: RunData, folder: RunFolder, indices: Path
) -> list[str]:
    """Return all flags of a training in `folder`; upstream caches data indices in `indices`."""
    experiment = config.experiment
    given = [*_data(experiment, data, indices), *_output(config, folder)]
    given += distillation_flags(experiment)
    quant = config.quantization
    quantizes = engine.flags(experiment.extra_flags, quant.types, quant.schedule)
    # Older releases of Transformer Engine lose gradients of layers that use quantizers.
    accumulates = not quantizes and leaves_wgrad(config) and machine.accumulates
    layout = config.placement.layout
    model = model_flags(experiment, machine, layout, accumulates=accumulates)
    return [*model, *given, *layout, *quantizes, *experiment.extra_flags]


def leaves_wgrad(config: RunConfig) -> bool:
    """Return whether wgrad is known to be unquantized in all layers and steps."""
    quant = config.quantization
    if quant.types is None or quant.recipe or quant.schedule:
        return False
    return quant.types.get("wgrad", NONE) == NONE


def model_flags(
    experiment: Experiment,
    machine: Machine,
    layout: Sequence[str] = (),
    *,
    stages: int | None = None,
    accumulates: bool = False,
) -> list[str]:
    """Return the flags of the model, its training and the machine.

    The model has this number of pipeline `stages`, or those of `layout` and the user's flags.
    """
    model = _architecture(experiment, layout, stages)
    platform = platform_flags(machine, accumulates=accumulates)
    return [*model, *_training(experiment), *DTYPES[experiment.dtype], *platform]


def platform_flags(machine: Machine, *, accumulates: bool = False) -> list[str]:
    """Return the flags of the local implementation on this machine.

    With `accumulates`, apex's kernel adds up the weight gradients.
    """
    flags = _LOCAL + (_ON_CUDA if machine.has_cuda else _ON_CPU)
    return words_of(flags + ([] if accumulates else [_NO_ACCUMULATION]))


def shape_flags(experiment: Experiment, layout: Sequence[str] = ()) -> list[str]:
    """Return the flags for the sizes of model, batch and layout; the user's flags come last."""
    model = _architecture(experiment, layout)
    return [*model, *_training(experiment), *layout, *experiment.extra_flags]


def _architecture(
    experiment: Experiment, layout: Sequence[str], stages: int | None = None
) -> list[str]:
    """Return the flags of the model; the parameters are as in `model_flags`."""
    stages = stages or pipeline_stages([*layout, *experiment.extra_flags])
    return architecture_flags(experiment.model, experiment.training.sequence, stages)


def pipeline_stages(flags: Sequence[str]) -> int:
    """Return the number of pipeline stages in the flags, at least 1."""
    sizes = read_flags(flags, {"pipeline-model-parallel-size": 1})
    return max(1, int(sizes.pipeline_model_parallel_size))


@dataclass(frozen=True)
class Length:
    """The length of a run: optimizer steps, and tokens per step."""

    steps: int
    tokens_per_step: int


def length(experiment: Experiment) -> Length:
    """Return the length of a run, after the user's flags."""
    names = ("train-iters", "train-samples", "global-batch-size", "seq-length")
    sizes = read_flags(shape_flags(experiment), dict.fromkeys(names, int))
    batch = sizes.global_batch_size
    samples = sizes.train_samples or 0  # not passed if --train-iters is given
    steps = samples // max(1, batch) if sizes.train_iters is None else sizes.train_iters
    return Length(steps, batch * sizes.seq_length)


def _training(experiment: Experiment) -> list[str]:
    """Return the flags of batch, length and schedule.

    Megatron takes one length, in steps or samples, and one warm-up. The user's flags come first.
    """
    training, names = experiment.training, ("train-iters", "lr-warmup-iters", "lr-warmup-samples")
    own = read_flags(experiment.extra_flags, dict.fromkeys(names, str))
    warms_up = own.lr_warmup_iters or own.lr_warmup_samples
    return words_of(
        [
            f"--micro-batch-size {training.micro_batch}",
            f"--global-batch-size {training.global_batch}",
            "" if own.train_iters else f"--train-samples {training.samples}",
            f"--lr {training.lr:g} --min-lr {training.min_lr:g} --lr-decay-style cosine",
            "" if warms_up else f"--lr-warmup-fraction {training.warmup_fraction:g}",
            "--adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0",
            "--init-method-std 0.02 --seed 1234",
        ]
    )


def vocabulary_flags(experiment: Experiment) -> list[str]:
    """Return the vocabulary's size without data: the sample's in a smoke run, else as published."""
    size = DEFAULT_VOCAB_SIZE if experiment.training.is_smoke else experiment.model.vocab_size
    return ["--vocab-size", str(size)]


def tokenizer_flags(folder: Path) -> list[str]:
    """Return the flags of a tokenizer's folder."""
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]


def _data(experiment: Experiment, data: RunData, indices: Path) -> list[str]:
    paths = ["--data-path", str(data.prefix), "--data-cache-path", str(indices)]
    documents = document_count(experiment.data_prefix) if experiment.data_prefix else None
    split = ["--split", _split(experiment.training, documents)]
    # No layer needs a causal mask as a tensor, but a mask of documents exists only as a tensor.
    masked = "--reset-attention-mask" in experiment.extra_flags
    mask = [] if masked else ["--no-create-attention-mask-in-dataloader"]
    return [*tokenizer_flags(data.tokenizer), *paths, *split, *mask]


def _split(training: Training, documents: int | None) -> str:
    """Return upstream's split of documents into training, validation and test.

    Upstream rounds; a small corpus still gets one document for validation.
    """
    held_out = training.held_out
    if documents and documents > 1 and round(documents * (1 - held_out)) == documents:
        return f"{documents - 1},1,0"
    return f"{100 - 100 * held_out:g},{100 * held_out:g},0"


def _output(config: RunConfig, folder: RunFolder) -> list[str]:
    experiment, training = config.experiment, config.experiment.training
    checkpoints = str((experiment.checkpoint or folder.checkpoints).resolve())
    events = (config.recording.tensorboard or folder.tensorboard).resolve()
    every = f"--eval-interval {training.eval_interval} --eval-iters {training.eval_iters}"
    log = f"--log-interval {training.log_interval} --tensorboard-log-interval 1"
    save = ["--save", checkpoints] if training.save_interval or experiment.checkpoint else []
    save += ["--save-interval", str(training.save_interval or training.iterations)] if save else []
    # A terminated job saves before it exits; saved files are hashed, so that damage is detected.
    save.append("--exit-signal-handler")
    ckpt_format = flag_table(experiment.extra_flags).get("--ckpt-format", HASHED)
    if ckpt_format == HASHED and _can_hash(config.placement.megatron):
        save.append("--verify-integrity")
    load = ["--load", checkpoints] if experiment.checkpoint else []
    board = ["--tensorboard-dir", str(events), "--log-timers-to-tensorboard"]
    return [*every.split(), *log.split(), *board, *save, *load]


def _can_hash(checkout: Path | None) -> bool:
    """Return whether the release has --verify-integrity, as since 0.17.1; the pinned one does."""
    file = (checkout or Path()) / "megatron/training/checkpointing.py"
    return checkout is None or not file.exists() or b"verify_integrity" in file.read_bytes()


def save_folder(config: RunConfig, folder: RunFolder) -> Path | None:
    """Return the folder that a run in `folder` saves in; None if it saves nothing."""
    flags = [*_output(config, folder), *config.experiment.extra_flags]
    path = flag_table(flags).get("--save")
    return Path(path).resolve() if path else None


def distillation_flags(experiment: Experiment) -> list[str]:
    """Return the flags for a teacher and the configuration of the distillation."""
    config, teacher = experiment.distillation_config, experiment.teacher
    flags = ["--export-kd-teacher-load", str(checkpoints_of(teacher))] if teacher else []
    return flags + (["--export-kd-cfg", str(config.resolve())] if config else [])
