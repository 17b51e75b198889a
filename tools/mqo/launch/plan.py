"""Choose the layout of a run on GPUs if the user gave none, and report the memory it needs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mqo.errors import CheckpointError, LayoutError, MqoError
from mqo.launch.checkpoints import tracked
from mqo.launch.command import flag_words, read_flags
from mqo.launch.config import Experiment, RunConfig
from mqo.launch.convert import checkpoint_arguments
from mqo.launch.effects import resolved_config
from mqo.launch.flags import pipeline_stages, shape_flags
from mqo.launch.layout import PARALLEL, check_layout, read_sizes
from mqo.launch.machine import Machine
from mqo.launch.options import schedules
from mqo.matrix import layer_pattern
from mqo.matrix.tables import NONE
from mqo.megatron.run.files import RELEASE, TRACKER
from mqo.quant import formats
from mqo.scale.choose import Fit, Workload, choose, measure
from mqo.scale.devices import gib, usable
from mqo.scale.layout import BUCKET, Layout, Recompute
from mqo.scale.memory import FP32, WIDTH, Arithmetic, Attention

# Flags of a layout. If the user gives one, the launcher does not choose.
_LAYOUT_FLAGS = re.compile(
    r"--(\w+-(\w+-)?parallel-size|sequence-parallel|use-distributed-optimizer|overlap-.*|recompute-.*"
    r"|ddp-.*|dist-ckpt-optim-.*|.*-fsdp.*|.*virtual.*|(.*-)?pipeline-.*|.*offload.*)"
)
# Flags whose effect on memory the formulas do not model.
_UNMODELED_FLAGS = re.compile(
    r"--(expert-tensor-parallel-size|.*-fsdp.*|.*virtual.*|pipeline-model-parallel-layout|.*offload.*"
    r"|decoder-(first|last)-.*|account-for-.*|transformer-impl|optimizer|use-precision-aware-.*"
    r"|fp8-.*|fp4-.*|num-experts|moe-(?!token-dispatcher|grouped-gemm).*|multi-latent-.*|kv-.*|qk?-.*|v-head-.*"
    r"|mtp-.*|hybrid-.*|freeze-.*)"
)
# Flags of a layout, and of local attention, in the form of `read_flags`.
_LAYOUT = {
    **PARALLEL,
    "use-distributed-optimizer": False,
    "overlap-grad-reduce": False,
    "dist-ckpt-optim-fully-reshardable": False,
    "ddp-bucket-size": BUCKET,
    "recompute-activations": False,
    "recompute-granularity": str,
    "recompute-modules": "core_attn",
    "recompute-method": str,
}
_ATTENTION = {
    "attention-backend": "auto",
    "softmax-type": "vanilla",
    "attention-dropout": 0.0,
    "window-size": str,
    "reset-attention-mask": False,
}
_FRESH = {"--no-load-optim", "--finetune"}


def decides(experiment: Experiment, machine: Machine) -> bool:
    """Return whether the launcher chooses the layout.

    It does on GPUs, at real size, if the user gives no layout and no flag whose effect on memory is
    not modeled.
    """
    chosen = _names(experiment, _LAYOUT_FLAGS) or _unmodeled(experiment)
    return _is_real(experiment, machine) and not chosen


def plan_layout(
    tree: Path, config: RunConfig, machine: Machine, types: Mapping[str, str]
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the run with a layout, if the user gave none, and lines on it and its memory.

    `types` are the quant types by site. A run that resumes keeps the layout of its checkpoint,
    which `tree` reads. A layout of the user is kept; the lines warn if it needs more memory than
    there is.

    Raises:
        LayoutError: no layout fits, or none divides the sizes.
    """
    bare, experiment = config.with_layout(()), config.experiment
    chooses = decides(experiment, machine)
    if not chooses:
        check_layout(bare)
    if not _is_real(experiment, machine):
        return bare, ()
    if cause := _unmodeled(experiment):
        return bare, (_unplanned(bare, cause),)
    work = workload_of(bare, machine, types)
    if not chooses:
        return bare, tuple(_judged(bare, machine, work))
    saved = saved_layout(tree, experiment)
    fit = choose(work, lambda layout: divides(bare, layout), saved)
    if fit is None:
        check_layout(bare.with_layout(saved.flags() if saved else ()))
        where = f" in the checkpoint's layout ({saved})" if saved else ""
        raise LayoutError(
            f"No layout of {experiment.model_name} in mode {config.quantization.name}{where} fits "
            f"{work.gpus} GPUs of {gib(work.limit)} usable GiB",
            expected="a layout whose computed memory fits",
            help="Use more GPUs, or give your own layout after `--`",
        )
    origin = "as in the checkpoint: " if saved else ""
    teacher = "; the teacher's memory is not counted" if experiment.teacher else ""
    line = f"{origin}{fit.layout}; {_how(fit)}: {gib(fit.need)} of {_room(machine)}{teacher}"
    return bare.with_layout(fit.layout.flags(experiment.dtype)), (line,)


def _unmodeled(experiment: Experiment) -> str:
    """Return what changes the memory in a way that the formulas do not model; "" if nothing."""
    if experiment.model.is_interleaved(pipeline_stages(experiment.extra_flags)):
        return f"{layer_pattern.FLAG} with several segments per stage"
    return min(_names(experiment, _UNMODELED_FLAGS), default="")


def _unplanned(config: RunConfig, cause: str) -> str:
    """Return the line about a layout that was not planned because of `cause`."""
    experiment = config.experiment
    unknown = f"its memory is not known, since {cause} changes it"
    if _names(experiment, _LAYOUT_FLAGS):
        return f"as given; {unknown}"
    none = layout_of(experiment.extra_flags, config.placement.cluster.processes)
    return f"{none}: no layout was chosen, and {unknown}; flags after `--` can give one"


def layout_of(flags: Sequence[str], gpus: int) -> Layout:
    """Return the layout in upstream's flags, over this number of processes."""
    args = read_flags(flags, _LAYOUT)
    # Other kinds of recomputation count as none, which overestimates the memory.
    recompute: Recompute = "none"
    if args.recompute_granularity == "full" and args.recompute_method == "uniform":
        recompute = "full"
    elif args.recompute_activations or args.recompute_granularity == "selective":
        recompute = "core_attn" if args.recompute_modules == "core_attn" else "none"
    return Layout.of_arguments(gpus, vars(args), recompute)


def saved_layout(tree: Path, experiment: Experiment) -> Layout | None:
    """Return the layout of the checkpoint from which the run resumes.

    None without a checkpoint, or if its optimizer is not loaded. `tree` is the Megatron that
    reads it.

    Raises:
        CheckpointError: no layout can be read from it.
    """
    flags = flag_words(experiment.extra_flags)
    given = flags.get("--load")
    folder = Path(given[0]) if given else experiment.checkpoint
    if folder is None or _FRESH & flags.keys() or not (folder / TRACKER).is_file():
        return None
    if tracked(folder) == RELEASE:
        return None
    args = _arguments(tree, folder.resolve())
    return None if args.get("no_save_optim") else Layout.of_arguments(args["world_size"], args)


def _arguments(tree: Path, folder: Path) -> Mapping[str, Any]:
    """Return the arguments of the newest checkpoint that is not damaged."""
    why = ""
    for path in (folder, *sorted(folder.glob("iter_*"), reverse=True)):
        try:
            return checkpoint_arguments(tree, path)
        except MqoError as error:
            why = why or str(error)
    raise CheckpointError(
        f"The layout of the checkpoints in {folder} cannot be read: {why}",
        expected="an intact checkpoint of a run",
        help="Give the layout that they were saved in after `--`",
    )


def _is_real(experiment: Experiment, machine: Machine) -> bool:
    return machine.has_cuda and not experiment.training.is_smoke


def _names(experiment: Experiment, pattern: re.Pattern[str]) -> set[str]:
    """Return the user's flags that match."""
    return set(filter(pattern.fullmatch, flag_words(experiment.extra_flags)))


def workload_of(config: RunConfig, machine: Machine, types: Mapping[str, str]) -> Workload:
    """Return the model, training and GPUs to plan for, with the user's flags applied."""
    experiment, quant, cluster = config.experiment, config.quantization, config.placement.cluster
    sizes = read_sizes(shape_flags(experiment))
    shape = ["hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"]
    shape += [] if experiment.model.pattern else ["num_layers"]
    options = resolved_config(config, types)
    typed = {site for site, name in types.items() if name != NONE}
    typed |= schedules(types, quant.schedule).keys()
    backward = frozenset(typed & {*formats.ATTENTION_BACKWARD})
    rounded = "pv" in typed or bool(backward)
    attention: Attention = "chunked" if rounded else "fused"
    spec = options.operand_spec("pv", "probs", "", types.get("pv", NONE)).spec
    by_tensor = rounded and spec.scales_by_tensor
    if keeps_scores(experiment.extra_flags, config.placement.without, rounded, by_tensor):
        attention = "unfused"
    linear = options.operand_type("fprop", "x", "", types.get("fprop", NONE))
    return Workload(
        model=experiment.model.model_copy(update={name: getattr(sizes, name) for name in shape}),
        training=experiment.training.model_copy(
            update={
                "micro_batch": sizes.micro_batch_size,
                "global_batch": sizes.global_batch_size,
                "sequence": sizes.seq_length,
            }
        ),
        arithmetic=Arithmetic(
            linear, _copies(options, types, WIDTH[experiment.dtype]), attention, backward
        ),
        dtype=experiment.dtype,
        gpus=cluster.processes,
        per_node=cluster.nproc_per_node,
        limit=usable(machine.memory),
        cached=options.cache_weights,
        block=max((options.blocks().get(site, 0) for site in ("fprop", "dgrad")), default=0),
        # With types in dgrad or wgrad, rounded gradients of the logits also exist at the peak. A
        # recipe keeps copies, and so does attention's backward pass. The simulated table has none.
        listed=not (quant.recipe or quant.schedule or backward)
        and {types.get(site, NONE) for site in ("dgrad", "wgrad")} == {NONE},
    )


def keeps_scores(
    flags: Sequence[str], without: Sequence[str], rounded: bool, by_tensor: bool
) -> bool:
    """Return whether local attention keeps its s x s scores under the user's flags.

    `without` are patches that are left out. `rounded` says that the probabilities have a type, and
    `by_tensor` that this type scales by the tensor's amax.
    """
    try:
        args = read_flags(flags, _ATTENTION)
    except LayoutError:  # upstream reports it
        return False
    return (
        args.attention_backend in ("unfused", "local")
        or args.softmax_type != "vanilla"
        or args.window_size is not None
        or "fused_attention" in without
        or (rounded and args.attention_dropout > 0)
        or (args.reset_attention_mask and (by_tensor or not rounded))
    )


def _copies(options: Any, types: Mapping[str, str], width: int) -> int:
    """Return the bytes per value of a linear weight's rounded copies.

    fprop and dgrad share a copy if their quantized values are equal. A copy that was multiplied by
    a gain is kept in fp32.
    """
    copies = set()
    for site in (formats.SITES[name] for name in ("fprop", "dgrad")):
        quant_type = types.get(site.name, NONE)
        spec = options.operand_spec(site.name, "weight", "", quant_type)
        if spec.is_quantized:
            copies.add((spec, None if spec.is_same_along_all_axes else site.rhs_axis))
    return sum(width if spec.gain == 1.0 else FP32 for spec, _ in copies)


def divides(config: RunConfig, layout: Layout) -> bool:
    """Return whether a layout divides the sizes of a run."""
    try:
        check_layout(config.with_layout(layout.flags(config.experiment.dtype)))
    except LayoutError:
        return False
    return True


def _judged(config: RunConfig, machine: Machine, work: Workload) -> list[str]:
    """Return lines about the user's layout; if it does not fit, also about one that does."""
    own = measure(work, layout_of(config.experiment.extra_flags, work.gpus))
    line = f"as given: {own.layout}; {_how(own)}: {gib(own.need)} of {_room(machine)}"
    if own.need <= work.limit:
        return [line]
    free = config.changed("experiment", extra_flags=_without_own(config.experiment.extra_flags))
    fit = choose(work, lambda layout: divides(free, layout))
    lines = [f"warning: {line}: it will probably run out of memory"]
    if fit:
        flags = " ".join(fit.layout.flags(work.dtype))
        lines.append(f"warning: the planner's layout needs {gib(fit.need)} GiB: {flags}")
    return lines


def _without_own(flags: Sequence[str]) -> tuple[str, ...]:
    """Return the flags without those of a layout, and their values."""
    kept = (
        [name, *values]
        for name, values in flag_words(flags).items()
        if not _LAYOUT_FLAGS.fullmatch(name)
    )
    return tuple(itertools.chain.from_iterable(kept))


def _how(fit: Fit) -> str:
    return "simulated" if fit.is_simulated else "computed"


def _room(machine: Machine) -> str:
    total = f"{machine.device} has {gib(machine.memory)}"
    return f"{gib(usable(machine.memory))} GiB usable per GPU ({total})"
