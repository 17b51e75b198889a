"""Write the README.md of a converted model: how it was trained, as the run recorded it.

Unrecorded facts are left out, and so are paths, because the page is meant to be published.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqo.errors import MqoError
from mqo.launch.config import Experiment, RunConfig
from mqo.launch.folder import environment_of
from mqo.launch.hf_config import dtype_of_args
from mqo.launch.hf_tokenizer import read_json
from mqo.launch.libraries import MODELOPT, library_labels
from mqo.launch.naming import own_data
from mqo.megatron.run.files import MODELOPT_FORMAT, RELEASE
from mqo.overlay.tree import release_in
from mqo.runs import TRAIN_LOSS, VALID_LOSS, RunFolder, training_losses
from mqo.untrusted import METADATA, read_safetensors_header, read_text

TEMPLATE, PAGE = "model_card.md.j2", "README.md"
UNQUANTIZED = ("none", "bf16")
CardRow = tuple[str, str]


@dataclass(frozen=True)
class Training:
    """The known facts of a training: the checkpoint and the run that wrote it.

    `args` are upstream's arguments in the checkpoint, `iteration` is the text in its tracker.
    """

    args: Mapping[str, Any]
    iteration: str
    run: RunFolder | None = None


def write(
    folder: Path, title: str, training: Training, packed: str = "", into: Path | None = None
) -> None:
    """Write README.md for the model in `folder`, into that folder or `into` another one.

    `packed` explains in Markdown how packed weights are stored and loaded.
    """
    import jinja2

    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    options |= {"undefined": jinja2.StrictUndefined}
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    template = jinja2.Environment(loader=loader, **options).get_template(TEMPLATE)
    text = template.render(card=card_fields(folder, title, training, packed)).rstrip()
    ((into or folder) / PAGE).write_text(f"{text}\n", encoding="utf-8")


def add_packed(folder: Path, packed: str) -> None:
    """Add the section on packed weights to the model card in `folder`, if it has one."""
    page = folder / PAGE
    if page.is_file():
        before = "The page up to here describes the model before its weights were packed."
        text = read_text(page).rstrip()
        text += f"\n\n## Packed weights\n\n{before}\n\nThese are: {packed}\n"
        page.write_text(text, encoding="utf-8")


def card_fields(folder: Path, title: str, training: Training, packed: str = "") -> dict[str, Any]:
    """Return the template's variables for the converted model in `folder`."""
    config = read_json(folder / "config.json")
    config_of_run = _config(training.run)
    types = _types(training, config_of_run)
    rows = [*_rows(training, config_of_run, types), *_losses(training), *_versions(training.run)]
    return {
        "title": title,
        "architecture": config["architectures"][0],
        "weights": count_weights(folder),
        "dtype": config["torch_dtype"],
        "has_tokenizer": (folder / "tokenizer_config.json").exists(),
        "rows": rows,
        "packed": packed,
        "notes": list(_notes(training, config_of_run, types)),
        "options": _options(training.run),
    }


def count_weights(folder: Path) -> int:
    """Return the number of weights in a folder's safetensors."""
    headers = map(read_safetensors_header, folder.glob("*.safetensors"))
    tensors = (tensor for header in headers for name, tensor in header.items() if name != METADATA)
    return sum(math.prod(tensor["shape"]) for tensor in tensors)


def _config(run: RunFolder | None) -> RunConfig | None:
    """Return the configuration of a run; None if it cannot be read, as from another release."""
    if run is None:
        return None
    try:
        return RunConfig.read(run)
    except MqoError:
        return None


def _types(training: Training, config: RunConfig | None) -> Mapping[str, str] | None:
    """Return {site: type or schedule}; None if it was not recorded."""
    types = training.args.get("mqo_types")  # the checkpoint's own, with the steps of schedules
    return types if isinstance(types, dict) else config.quantization.types if config else None


def _libraries(args: Mapping[str, Any], config: RunConfig | None) -> list[str]:
    """Return what other libraries quantized, from the run and the checkpoint's own arguments."""
    types = config.quantization.library_types if config else {}
    if name := args.get(MODELOPT_FORMAT):
        types = types | {MODELOPT: str(name)}
    return library_labels(types)


def _quantized(types: Mapping[str, str] | None) -> dict[str, str]:
    return {site: text for site, text in (types or {}).items() if text not in UNQUANTIZED}


def _rows(
    training: Training, config: RunConfig | None, types: Mapping[str, str] | None
) -> Iterator[CardRow]:
    args = training.args
    if config:
        experiment = config.experiment
        yield "model", _model(experiment)
        yield "dataset", _dataset(experiment)
        yield "mode", f"{config.mode_label}, training configuration {experiment.training.name}"
    sizes = f"{args['num_layers']} layers, hidden size {args['hidden_size']}"
    yield "size", f"{sizes}, {args['num_attention_heads']} attention heads"
    libraries = _libraries(args, config)
    if types is not None or libraries:
        parts = [f"{site} {text}" for site, text in _quantized(types).items()]
        parts += [f"linear layers {text}" for text in libraries]
        yield "quantized GEMMs", ", ".join(parts) or "none"
    yield "training dtype", dtype_of_args(args)
    if training.iteration.isdecimal():
        yield "optimizer steps", f"{int(training.iteration):,}"
    samples, length = args.get("consumed_train_samples"), args.get("seq_length")
    if samples and isinstance(samples, int) and isinstance(length, int):
        yield "tokens seen", f"{samples * length:,}, in sequences of {length:,}"


def _model(experiment: Experiment) -> str:
    """Return the model's name, and the differences of its architecture to the published one."""
    published = experiment.model.published_as
    kind = f"the architecture of {published}" if published else "the user's own model"
    text = f"{experiment.model_name}, {kind}"
    changes = (f"{flag} {value}".rstrip() for flag, value in experiment.model_changes.items())
    return f"{text}, changed by {', '.join(changes)}" if experiment.model_changes else text


def _dataset(experiment: Experiment) -> str:
    """Return the data that were read; the published dataset's name would claim too much."""
    dataset = experiment.dataset
    if own_data(experiment.data_prefix, experiment.extra_flags) is None:
        return f"mqo's small sample {dataset.name} (not all of {dataset.published_as})"
    return f"the user's own data, named {dataset.name}"


def _losses(training: Training) -> Iterator[CardRow]:
    """Yield the last losses at or before the checkpoint's step, in nats per token."""
    if training.run is None or not training.iteration.isdecimal():
        return
    metrics = training.run.read_metrics()
    step = int(training.iteration)
    for name, series in (
        ("training loss", training_losses(metrics)),
        ("validation loss", metrics.get(VALID_LOSS, [])),
    ):
        for last, loss in [row for row in series if row[0] <= step][-1:]:
            kind = "" if name != "training loss" or TRAIN_LOSS in metrics else " (distillation)"
            yield name + kind, f"{loss:.4f} nats per token at step {last:,}"


def _versions(run: RunFolder | None) -> Iterator[CardRow]:
    """Yield the versions that trained, and the one that converted."""
    if run is not None:
        facts = environment_of(run)
        packages = facts.packages if facts else {}
        versions = [("megatron-core", release_in(run.source))]
        versions += [(name, packages.get(name)) for name in ("torch", "mqo")]
        if known := ", ".join(f"{name} {version}" for name, version in versions if version):
            yield "trained with", known
        if facts and facts.commit:
            changed = " with uncommitted changes" if facts.commit.endswith("+") else ""
            yield "commit of mqo", f"{facts.commit.rstrip('+')}{changed}"
    yield "converted with", f"mqo {importlib.metadata.version('mqo')}"


def _notes(
    training: Training, config: RunConfig | None, types: Mapping[str, str] | None
) -> Iterator[str]:
    if _quantized(types):
        yield (
            "Quantization was emulated: the operands of the named GEMMs were rounded to values of "
            f"the format and multiplied in {dtype_of_args(training.args)}. Transformers does not "
            "round them."
        )
    if libraries := _libraries(training.args, config):
        yield f"Another library quantized linear layers in the training: {', '.join(libraries)}."
    if config and config.experiment.teacher:
        yield "The model was distilled from a teacher."
    if _started_from_weights(training):
        yield "The training began from another checkpoint, whose tokens are not counted here."
    if training.iteration == RELEASE:
        yield "The checkpoint holds imported weights and no record of a training."
    if training.run is None:
        yield (
            "The run folder was missing when the model was converted, so the dataset, the losses "
            "and the versions are not known here."
        )


def _started_from_weights(training: Training) -> bool:
    if training.args.get("pretrained_checkpoint"):
        return True
    facts = environment_of(training.run) if training.run else None
    return facts is not None and facts.inputs.iteration == RELEASE


def _options(run: RunFolder | None) -> str:
    """Return quant.toml without its comments."""
    if run is None or not run.quant_config.is_file():
        return ""
    lines = read_text(run.quant_config, errors="replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#")).strip()
