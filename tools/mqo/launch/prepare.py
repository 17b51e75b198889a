"""Prepare what a run needs (Megatron, patches, data), skipping steps that are done."""

from __future__ import annotations

import shlex
from pathlib import Path

from mqo.data.own_text import TextFiles, bad_line, prepare_text, survey
from mqo.data.pair_check import check_fit, check_prefix, is_there
from mqo.data.prepare import layout, prepare
from mqo.display import Say
from mqo.errors import DataError, MissingError, OverlayError
from mqo.extras import require
from mqo.launch import engine
from mqo.launch.checkpoints import newest, require_tracker, saved
from mqo.launch.config import Experiment, RunConfig
from mqo.launch.effects import check_effects
from mqo.launch.flags import RunData, length
from mqo.launch.hybrid import check_checkout
from mqo.launch.layout import check_layout
from mqo.launch.length import check_length
from mqo.launch.machine import Machine, detect
from mqo.launch.naming import own_data
from mqo.launch.plan import decides
from mqo.launch.source import DISTILLER, ready_checkout
from mqo.launch.upstream_flags import check_flags
from mqo.matrix import tables
from mqo.megatron.run.files import TRACKER
from mqo.overlay.apply import Applied, apply, refuse_edits
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.overlay.vendor import Pin, vendor
from mqo.project import Project
from mqo.runs import checkpoints_of
from mqo.untrusted import check_tokenizer, reading


def check_config(
    config: RunConfig, machine: Machine | None = None, missing: list[MissingError] | None = None
) -> None:
    """Refuse early what would fail minutes later, such as a layout or data that does not fit.

    The checks include the user's flags. A layout that the launcher chooses for the machine
    (default: this one) is checked when it is chosen. If `missing` is given, errors about missing
    files are added to it instead of raised.
    """
    require("torch")
    experiment = config.experiment
    if not decides(experiment, machine or detect()):
        check_layout(config)
    check_length(experiment)
    quant, flags = config.quantization, experiment.extra_flags
    check_flags(flags, engine.flags(flags, quant.types, quant.schedule))
    check_checkout(experiment.model, config.placement.megatron)
    if quant.types is not None:  # else the tree gives them
        check_effects(config, quant.types)
    for check in (_check_nodes, _check_teacher, _check_pair, _check_tokenizer, _check_data):
        try:
            check(config)
        except MissingError as error:
            if missing is None:
                raise
            missing.append(error)


def _check_nodes(config: RunConfig) -> None:
    nodes = config.placement.cluster.nnodes
    if nodes > 1 and config.experiment.checkpoint is None:
        raise MissingError(
            f"{nodes} nodes would each save their part of a checkpoint in their own run folder",
            expected="the argument CHECKPOINT, a folder that all nodes share",
        )


def _check_teacher(config: RunConfig) -> None:
    """Raise DataError for a faulty distillation, or MissingError if the teacher is missing."""
    experiment, megatron = config.experiment, config.placement.megatron
    check_distillation(experiment, megatron)
    if experiment.teacher:
        expected = f"a folder with {TRACKER}, or a run with checkpoints"
        folder = checkpoints_of(experiment.teacher)
        require_tracker(folder, MissingError, expected, whose=" of a teacher")


def _check_pair(config: RunConfig) -> None:
    if config.experiment.data_prefix is not None and config.experiment.text is None:
        check_prefix(config.experiment.data_prefix)


def _check_tokenizer(config: RunConfig) -> None:
    """Raise MissingError if the tokenizer is missing, or DataError if it exceeds the limits."""
    tokenizer, text = config.experiment.tokenizer, config.experiment.text
    if text is not None and text.tokenizer is None:
        _check_trained(config.experiment)
        return
    if tokenizer is None:
        return
    if not tokenizer.exists():
        raise MissingError(
            f"The tokenizer {tokenizer} does not exist",
            expected="a folder with tokenizer.json, as saved by transformers",
        )
    with reading(DataError):
        check_tokenizer(tokenizer)


def _check_trained(experiment: Experiment) -> None:
    """Raise MissingError for a model of published size, which needs a published tokenizer."""
    if experiment.training.is_smoke:
        return
    raise MissingError(
        f"No tokenizer was given for {experiment.dataset.name}; one that is trained on the text is "
        f"only for --training-config {_small()}",
        expected="--tokenizer FOLDER, with tokenizer.json as saved by transformers",
    )


def _small() -> str:
    return ", ".join(name for name, row in tables.trainings().items() if row.is_smoke)


def _check_data(config: RunConfig) -> None:
    """Raise MissingError if data are missing, DataError if they do not match the tokenizer."""
    experiment = config.experiment
    if (experiment.tokenizer is None) != (experiment.data_prefix is None):
        raise DataError(
            "Only one of TOKENIZER and DATA_PREFIX was given",
            expected="both, since an index holds a tokenizer's ids; or neither, for the sample",
        )
    if experiment.text is not None:
        return
    if experiment.tokenizer is not None and experiment.data_prefix is not None:
        if experiment.tokenizer.exists() and is_there(experiment.data_prefix):
            check_fit(experiment.tokenizer, experiment.data_prefix)
    elif RunData.given(experiment) is None and not has_sample(experiment):
        sample = f"its sample is only for --training-config {_small()}"
        none = "it has no sample"
        lacking = "tokenizer" if own_data(None, experiment.extra_flags) else "data"
        why = sample if experiment.dataset.sample else none
        raise MissingError(
            f"No {lacking} was given for {experiment.dataset.name}; {why}",
            expected="--text FILE --tokenizer FOLDER, or the arguments CHECKPOINT TENSORBOARD "
            "TOKENIZER DATA_PREFIX [DTYPE]",
            help="`.venv/bin/mqo data prepare jsonl --input CORPUS --tokenizer TOKENIZER --output "
            "OUT` makes an index of your corpus of JSON lines, with DATA_PREFIX OUT_text_document",
        )


def check_distillation(experiment: Experiment, megatron: Path | None) -> None:
    """Raise DataError for a configuration without a teacher, or a tree that cannot distill."""
    if experiment.teacher is None:
        if experiment.distillation_config is not None:
            raise DataError("--distillation-config was given", expected="--teacher with it")
        return
    if megatron is not None and not (megatron / DISTILLER).is_file():
        raise DataError(
            f"--teacher was given with --megatron {megatron}, which has no {DISTILLER}",
            expected="a tree with the patch `programs`, which adds it (Megatron 0.17 or newer)",
            help=f"Run `mqo apply --tree {shlex.quote(str(megatron))}`",
        )
    config = experiment.distillation_config
    if config is not None and not config.is_file():
        raise MissingError(
            f"The distillation configuration {config} does not exist", expected="a YAML file"
        )


def has_sample(experiment: Experiment) -> bool:
    """Return whether the run may use the dataset's sample, so that it needs no other data."""
    return experiment.training.is_smoke and experiment.dataset.sample


def ready_tree(project: Project, series: Series, report: Say, *, allow_edits: bool) -> Tree:
    """Return the shared tree, vendored and patched; EditedError if edited, unless `allow_edits`."""
    tree, pin = Tree(project.tree), Pin.load(project.upstream_pin)
    if not (tree.store / "upstream.json").exists():
        vendor(tree, pin, project.cache, report=report)
    if project.is_installed:
        _place_programs(project)
    _check_version(tree, pin)
    if allow_edits and tree.manifest():
        edited = tree.edited_files()
        report(f"tree     : used as it is, with {len(edited)} files edited by hand")
        return tree
    refuse_edits(tree)
    outcome = apply(tree, series)
    version = tree.upstream().version
    patched = f"{outcome.changed} files patched" if isinstance(outcome, Applied) else "patched"
    report(f"megatron : {version}, {patched}")
    return tree


def _place_programs(project: Project) -> None:
    """Copy the programs of a clone's tree into the tree of an installed wheel."""
    for path in (path for path in project.ours.rglob("*") if path.is_file()):
        name = path.relative_to(project.ours).as_posix()
        target, content = project.tree / name, path.read_bytes()
        if not (target.is_file() and target.read_bytes() == content):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def check_tree(project: Project, config: RunConfig, *, allow_edits: bool) -> None:
    """Refuse a tree that a run would refuse; change nothing.

    The shared tree may lack Megatron or the patches, because a run adds them.
    """
    if (checkout := config.placement.megatron) is not None:
        ready_checkout(config, checkout, allow_edits=allow_edits)
        return
    tree, pin = Tree(project.tree), Pin.load(project.upstream_pin)
    if tree.manifest():
        _check_version(tree, pin)
        if not allow_edits:
            refuse_edits(tree)


def _check_version(tree: Tree, pin: Pin) -> None:
    """Refuse any version but the pinned one, for which the training program is written."""
    version = tree.upstream().version
    if version != pin.version:
        raise OverlayError(
            f"{tree.root} holds megatron-core {version}, from {tree.upstream().origin}",
            expected=f"{pin.version}, the version in UPSTREAM.toml",
            help="`mqo restore` and then `mqo vendor` install the pinned version there",
        )


def note_checkpoint(experiment: Experiment, report: Say) -> None:
    """Report the checkpoint in CHECKPOINT from which the run continues, if there is one.

    The run itself skips damaged checkpoints, and logs that.
    """
    folder, steps = experiment.checkpoint, length(experiment).steps
    if folder is None:
        return
    if (folder / TRACKER).is_file():
        if step := newest(folder):
            report(f"resume   : from iteration {step} in {folder}")
        if step and step.isdecimal() and int(step) >= steps:
            report(f"note     : that is step {steps} of {steps}; only the final validation remains")
    elif iterations := saved(folder):
        report(
            f"note     : {folder} has no {TRACKER}; the run continues from the newest intact "
            f"checkpoint of {', '.join(iterations)}"
        )


def ready_data(project: Project, experiment: Experiment, report: Say) -> RunData:
    """Return the user's data, or the dataset's sample; prepare what is missing."""
    if experiment.text is not None:
        return _ready_text(project, experiment, experiment.text, report)
    if given := RunData.given(experiment):
        report(f"data     : {given.prefix}")
        return given
    name = experiment.dataset.name
    folder, ready = prepare(project, name, report=report)
    report(f"data     : {ready.documents} documents, {ready.tokens:,} tokens of {name}")
    _, tokenizer, prefix = layout(folder, name)
    return RunData(tokenizer, prefix, ready.vocab_size)


def text_note(project: Project, experiment: Experiment) -> str:
    """Return a line on the text that the run would prepare; '' without text.

    Raises DataError if the run would refuse the text.
    """
    if (text := experiment.text) is None:
        return ""
    documents, bad = survey(text)
    words = experiment.tokenizer if text.tokenizer else "trained on it"
    state = "prepared in" if text.contents(project) else "a run would prepare it in"
    parts = [
        f"text: {documents:,} documents of {', '.join(text.files)}",
        f"{experiment.training.held_out:.0%} held out",
        f"tokenizer: {words}",
        f"{state} {text.folder(project)}",
    ]
    return "; ".join([*parts, bad_line(bad)] if bad else parts)


def _ready_text(project: Project, experiment: Experiment, text: TextFiles, report: Say) -> RunData:
    given = experiment.tokenizer if text.tokenizer else None
    contents = prepare_text(project, text, given, report=report)
    count = f"{contents.documents:,} documents, {contents.tokens:,} tokens"
    report(f"data     : {count} of {', '.join(text.files)}")
    if contents.bad:
        report(f"data     : {bad_line(contents.bad)}")
    trained, prefix = text.paths(project)
    return RunData((given or trained).resolve(), prefix.resolve(), contents.vocab_size)
