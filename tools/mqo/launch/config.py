"""Define the configuration of a run: four parts, written once to the run's cell.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from mqo.data.own_text import TextFiles
from mqo.errors import LayoutError, MqoError
from mqo.launch import engine
from mqo.launch.architecture import architecture_changes
from mqo.launch.command import read_flags
from mqo.launch.hybrid import HYBRID, ModelClass, chosen_model
from mqo.launch.libraries import LibraryQuantization, engine_quantization
from mqo.launch.models import model_of
from mqo.launch.naming import check_own, dataset_of, folder_part
from mqo.launch.options import OPTIONS, Chosen, quant_toml, split
from mqo.launch.own_formats import declare_formats, format_rows, own_rows, used_formats
from mqo.launch.plugins import RunPlugin, declare_rows, labels, plugins_of, toml_rows, used
from mqo.launch.user_paths import absolute_paths
from mqo.matrix import layer_pattern, tables
from mqo.matrix.tables import NONE, AttentionGemms, Dataset, Dtype, Gemms, Mode, Model, Training
from mqo.quant.own_formats import FormatRow
from mqo.quant.recipe import DESCRIPTION, Recipe
from mqo.run_records import damaged
from mqo.runs import RunFolder

SOURCE = "source"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True)


class Experiment(_Section):
    """The model to train, its data, and the weights it starts from.

    `model` has the trained sizes: those that the training configuration shrinks. `extra_flags` are
    the user's flags for Megatron. `teacher` is a run or a folder of checkpoints, to distill from as
    configured by `distillation_config`, a YAML file. `name` is the user's name for the model.
    `text` are the files that the index at `data_prefix` is made of, if the run makes it.
    `model_file` describes the user's own model. `shrink` divides width and depth instead of the
    training configuration. `start` is a Hugging Face folder with the weights to start from.
    `model_class` and `layer_pattern` are the user's choice of upstream's model; `model` has both.
    """

    model: Model
    dataset: Dataset
    training: Training
    dtype: Dtype
    checkpoint: Path | None = None
    tokenizer: Path | None = None
    data_prefix: Path | None = None
    text: TextFiles | None = None
    extra_flags: tuple[str, ...] = ()
    teacher: Path | None = None
    distillation_config: Path | None = None
    name: str | None = None
    model_file: Path | None = None
    start: Path | None = None
    shrink: tuple[int, int] | None = None
    model_class: ModelClass | None = None
    layer_pattern: str | None = None

    @property
    def model_name(self) -> str:
        """Return the user's name of the model, or the published one; with * if its shape differs.

        A training configuration that shrinks the model does not change the name; --shrink does.
        """
        if self.name:
            return self.name
        full = self.shrink in (None, (1, 1))
        size = "" if full else "-w{}d{}".format(*self.shrink or ())
        kind = f"-{HYBRID}" if self.model_class == HYBRID else ""
        return self.model.name + size + kind + ("*" if self.model_changes else "")

    @property
    def model_changes(self) -> dict[str, str]:
        """Return {flag: value} of the flags after `--` that change the published architecture."""
        pattern = {layer_pattern.FLAG: self.layer_pattern} if self.layer_pattern else {}
        return architecture_changes(self.model, self.extra_flags) | pattern


class Quantization(_Section):
    """How a run quantizes.

    `types` are the quant types per site, which are written into the run's source; None keeps the
    literals of the tree (`--quantization source`). A `recipe` sets the types of linear layers.
    `schedule` are 'SITE: schedule' texts. `libraries` are what other libraries quantize. `formats`
    are the user's formats that the run uses, by name, and `plugins` are the custom quantizers. The
    run itself checks that each excluded layer exists.
    """

    mode: str
    types: dict[str, str] | None = None
    gemms: Gemms = "fprop"
    attention_gemms: AttentionGemms = "forward"
    schedule: tuple[str, ...] = ()
    libraries: tuple[LibraryQuantization, ...] = ()
    recipe: Recipe | None = None
    allow_mostly_unquantized: bool = False
    formats: dict[str, FormatRow] = {}
    plugins: tuple[RunPlugin, ...] = ()
    options: Chosen = {}

    @model_validator(mode="before")
    @classmethod
    def _declare(cls, fields: Any) -> Any:
        """Make formats and quantizers of the user types, before fields with types are checked."""
        if isinstance(fields, dict):
            declare_formats(fields.get("formats") or {})
            declare_rows(fields.get("plugins") or ())
        return fields

    @property
    def name(self) -> str:
        """Return the names of recipe, mode (unless it adds nothing), libraries and schedules.

        The versions of the user's formats and of custom quantizers follow.
        """
        names = [self.recipe.label] if self.recipe else []
        libraries = [library.label for library in self.libraries]
        adds = self.mode != tables.UNQUANTIZED or not (names or libraries)
        names += [self.mode] if adds else []
        name = ", ".join(filter(None, (" ".join(names), *libraries, *self.schedule)))
        return " ".join([name, *labels(self)])

    @property
    def all_types(self) -> set[str]:
        """Return the types of the run, including those of its schedules and its recipe.

        If they come from the tree, only the user's formats are known.
        """
        of_tree = self.formats if self.types is None else ()
        return all_types(self.types, self.schedule, self.recipe).union(of_tree)

    @property
    def library_types(self) -> dict[str, str]:
        """Return {library: format} of what other libraries quantize."""
        return {library.library: library.format for library in self.libraries}


class Cluster(_Section):
    """The nodes and processes of a run, in torchrun's terms."""

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "localhost"
    master_port: int | None = None
    nproc_per_node: int = 1

    @property
    def processes(self) -> int:
        """Return the number of processes on all nodes."""
        return self.nnodes * self.nproc_per_node


class Placement(_Section):
    """Where a run runs: its processes, the planner's flags, and the source.

    `megatron` is a full checkout, whose own pretrain_gpt.py runs instead of the shared tree's;
    `without` are patches that are left out.
    """

    cluster: Cluster = Cluster()
    layout: tuple[str, ...] = ()
    megatron: Path | None = None
    without: tuple[str, ...] = ()


class Recording(_Section):
    """What a run records: its options, and the folder for TensorBoard's events."""

    tensorboard: Path | None = None
    options: Chosen = {}


class RunConfig(_Section):
    """Model, dataset, mode and training configuration, resolved, with the user's changes."""

    experiment: Experiment
    quantization: Quantization
    placement: Placement = Placement()
    recording: Recording = Recording()

    @classmethod
    def read(cls, run: RunFolder) -> RunConfig:
        """Return the configuration of a run; RunError if it has none."""
        try:
            return cls.model_validate(run.read_config())
        except ValueError as error:
            raise damaged(run.config, error) from error

    def write(self, run: RunFolder) -> None:
        """Write it into a run's folder."""
        run.config.write_text(self.model_dump_json(indent=1), encoding="utf-8")

    @property
    def mode_label(self) -> str:
        """Return the mode's name for tables and plots."""
        return tables.mode_label(self.quantization.name, self.experiment.dtype)

    @property
    def title(self) -> str:
        """Return its name for a folder; with several nodes each has its own folder."""
        experiment = self.experiment
        names = (experiment.model_name, experiment.dataset.name)
        parts = map(folder_part, (*names, self.quantization.name, experiment.training.name))
        name = "_".join(parts) + ("_distilled" if experiment.teacher else "")
        where = self.placement.cluster
        return f"{name}_node{where.node_rank}" if where.nnodes > 1 else name

    def quant_toml(self, types: Mapping[str, str]) -> str:
        """Return quant.toml of a run whose source has `types`."""
        quant = self.quantization
        options = quant.options | self.recording.options
        formats, plugins = format_rows(quant.formats), toml_rows(quant.plugins)
        rows = self._rows() | {"formats": formats, "plugins": plugins}
        return quant_toml(types, options, quant.schedule, **rows)

    def layers_toml(self) -> str:
        """Return the parts of quant.toml that assign types to layers and operands."""
        quant, rows = self.quantization, self._rows()
        patterns = {k: v for k, v in quant.options.items() if OPTIONS[k].table == "layers"}
        kept = ("quant_type", "source")
        operands = {
            name: {key: value for key, value in row.items() if key in kept}
            for name, row in rows.get("operands", {}).items()
        }
        # A source and a rule's recipe refer to the types of sites.
        needs_types = rows.get("recipes") or any("source" in row for row in operands.values())
        types = quant.recipe.types.by_site() if quant.recipe and needs_types else {}
        # Without files: these parts do not need the functions.
        plugins = {p.name: {"declared": p.declared} for p in quant.plugins}
        rows |= {"operands": operands, "formats": format_rows(quant.formats), "plugins": plugins}
        return quant_toml(types, patterns, **rows)

    def _rows(self) -> dict[str, Any]:
        """Return the recipe's rows of quant.toml."""
        recipe = self.quantization.recipe
        return recipe.rows(block_layers(self.experiment)) if recipe else {}

    def changed(self, part: str, **fields: Any) -> RunConfig:
        """Return a copy with changed fields of a part."""
        own = getattr(self, part).model_copy(update=fields)
        return self.model_copy(update={part: own})

    def with_layout(self, flags: Sequence[str]) -> RunConfig:
        """Return a copy with these flags of a layout."""
        return self.changed("placement", layout=tuple(flags))

    def settings(self) -> dict[str, Any]:
        """Return all fields as JSON, without what only describes a recipe.

        Runs of earlier versions have the defaults of later fields, and later words do not count.
        """
        return self.model_dump(mode="json", exclude={"quantization": {"recipe": DESCRIPTION}})

    def using(self, types: Mapping[str, str]) -> RunConfig:
        """Return a copy without the user's formats that a run with these types does not use."""
        quant = self.quantization
        names = all_types(types, quant.schedule, quant.recipe)
        return self.changed("quantization", formats=used_formats(quant.formats, names))

    def with_library(self, library: LibraryQuantization) -> RunConfig:
        """Return a copy with what another library quantizes."""
        return self.changed("quantization", libraries=(*self.quantization.libraries, library))


def resolve(
    model: str,
    dataset: str | None,
    quantization: str,
    training: str,
    *,
    dtype: Dtype | None = None,
    gemms: Gemms = "fprop",
    attention_gemms: AttentionGemms = "forward",
    linear: str | None = None,
    attention: str | None = None,
    recipe: Recipe | None = None,
    plugins: Iterable[Path] = (),
    plugin_options: Iterable[str] = (),
    **rest: Any,
) -> RunConfig:
    """Return the configuration of these names; UnknownNameError lists the valid ones.

    `dataset` may be any name, or None, if the user's own data are given. `quantization` is a mode,
    or "source" for the types in the tree; `linear` and `attention` change the mode as in
    `tables.changed`. A `recipe` sets the types of linear layers; MqoError if the mode sets them,
    too. `plugins` are files of quantizers, which become types; the run keeps those that it uses.
    It also keeps the rows of the formats that it uses, of those that `OwnTypes` made types.
    `rest` are fields of the parts, and options by their names. `keep_checkpoints` defaults to the
    number in the training configuration, or to all if the folder already holds more.
    """
    own = plugins_of(plugins, plugin_options, recipe)
    options = {name: rest.pop(name) for name in OPTIONS if name in rest}
    experiment_fields, quantization_fields, placement_fields, recording_fields = _by_part(rest)
    experiment = _experiment(model, dataset, training, dtype, experiment_fields)
    mode = _mode(quantization, linear, attention, attention_gemms)
    types = mode.types(gemms, attention_gemms) if mode else None
    if recipe is not None:
        _check_conflicts(recipe, mode, gemms, attention_gemms, options)
        types, gemms = (types or {}) | recipe.types.by_site(), "all"
        options = recipe.options | options
    _check_options(options, placement_fields.get("without", ()), experiment)
    if engine.is_asked(experiment.extra_flags):
        options.setdefault("cache_weights", True)  # as it does: weights are rounded once per step
    options.setdefault("keep_checkpoints", _kept(experiment.checkpoint, experiment.training))
    quantizer, recorder = split(options)
    schedule = quantization_fields.get("schedule", ())
    names = all_types(types, schedule, recipe)
    return RunConfig(
        experiment=experiment,
        quantization=Quantization(
            mode=mode.name if mode else SOURCE,
            types=types,
            gemms=gemms,
            attention_gemms=attention_gemms,
            recipe=recipe,
            formats=used_formats(own_rows(), None if types is None else names),
            plugins=used(own, names),
            options=quantizer,
            libraries=_libraries(experiment, types, schedule),
            **quantization_fields,
        ),
        placement=Placement(**placement_fields),
        recording=Recording(options=recorder, **recording_fields),
    )


def all_types(
    types: Mapping[str, str] | None, schedule: Iterable[str], recipe: Recipe | None
) -> set[str]:
    """Return the types of a run, including those of its schedules and its recipe."""
    names = {*(types or {}).values()}
    names |= {word for text in schedule for word in re.findall(r"\w+", text.partition(":")[2])}
    return names | (recipe.all_types() if recipe else set())


def _by_part(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the fields of each part, in the order of RunConfig; TypeError for an unknown field."""
    parts = (Experiment, Quantization, Placement, Recording)
    if unknown := fields.keys() - {name for part in parts for name in part.model_fields}:
        raise TypeError(f"no part of a run's configuration has {', '.join(sorted(unknown))}")
    for part in parts:
        yield {name: value for name, value in fields.items() if name in part.model_fields}


def _experiment(
    model: str, dataset: str | None, training: str, dtype: Dtype | None, rest: dict[str, Any]
) -> Experiment:
    """Return the experiment of these names; `rest` are its other fields."""
    if (name := rest.get("name")) is not None:
        check_own("model", name)
    full, file = model_of(model, name)
    flags = tuple(absolute_paths(rest.get("extra_flags", ())))
    if rest.get("text") is not None and dataset in tables.datasets():
        dataset = None  # the scripts name one, which would be a false name for a text
    corpus = dataset_of(dataset, rest.get("data_prefix"), flags)
    config = tables.pick(tables.trainings(), "training configuration", training)
    sequence = min(config.sequence, full.train_sequence)
    usual = (config.shrink_width, config.shrink_depth)
    shrink = rest.pop("shrink", None) or usual
    model_class = rest.get("model_class")
    sized, pattern, flags = chosen_model(full.shrunk(*shrink), model_class, flags)
    experiment = Experiment(
        model=sized,
        dataset=corpus,
        training=config.model_copy(update={"sequence": sequence}),
        dtype=dtype or config.dtype,
        model_file=file,
        shrink=None if shrink == usual else shrink,
        layer_pattern=pattern,
        **rest | {"extra_flags": flags},
    )
    if not (changes := experiment.model_changes):
        return experiment
    if experiment.start is not None:
        raise MqoError(
            f"--from was given with {', '.join(changes)} after `--`, which changes its model",
            expected="the model of the weights",
        )
    # Stored for trackers, which read cell.json.
    return experiment.model_copy(update={"name": experiment.model_name})


def _libraries(
    experiment: Experiment, types: dict[str, str] | None, schedule: Sequence[str]
) -> tuple[LibraryQuantization, ...]:
    """Return what libraries quantize under a run's flags; a checkpoint may add to it."""
    ours = engine.flags(experiment.extra_flags, types, schedule)
    library = engine_quantization([*ours, *experiment.extra_flags], num_layers(experiment))
    return (library,) if library else ()


def num_layers(experiment: Experiment) -> int:
    """Return the number of transformer blocks of a model, after the user's flags."""
    try:
        layers = {"num-layers": experiment.model.num_layers}
        return read_flags(experiment.extra_flags, layers).num_layers
    except LayoutError:  # check_layout reports it
        return experiment.model.num_layers


def block_layers(experiment: Experiment) -> tuple[range, ...]:
    """Return the indices of each block's layers, of which a block of a GPT has one."""
    if experiment.model.pattern is not None:
        return layer_pattern.layers_of(experiment.model.blocks)
    return tuple(range(n, n + 1) for n in range(num_layers(experiment)))


def _check_conflicts(
    recipe: Recipe,
    mode: Mode | None,
    gemms: Gemms,
    attention_gemms: AttentionGemms,
    options: dict[str, Any],
) -> None:
    """Raise MqoError if mode, choices of GEMMs or options set what the recipe sets."""
    if mode is None or mode.linear != NONE:
        cause = f"the mode {mode.name} quantizes linear layers" if mode else "it was 'source'"
        raise MqoError(
            f"The mode cannot be combined with the recipe {recipe.name}: {cause}",
            expected="a mode that quantizes only attention, such as bf16 (the default) or FA_T",
        )
    if recipe.types.of_attention and {mode.qk, mode.pv} != {NONE}:
        raise MqoError(
            f"The mode {mode.name} and the recipe {recipe.name} both quantize attention",
            expected="the mode bf16 (the default)",
        )
    if gemms != "fprop":
        raise MqoError(
            f"--gemms {gemms} cannot be combined with the recipe {recipe.name}",
            expected="no --gemms: a recipe has a type for each GEMM",
        )
    if recipe.types.of_attention and attention_gemms != "forward":
        raise MqoError(
            f"--attention-gemms {attention_gemms} cannot be combined with the recipe "
            f"{recipe.name}, which has types for attention",
            expected="no --attention-gemms",
        )
    if options.get("save_activations") == "packed" and recipe.types.fprop == NONE:
        raise MqoError(
            f"--save-activations packed was given, but the recipe {recipe.name} quantizes no input "
            "of fprop",
            expected="--save-activations full, since there are no codes to save",
        )
    rows = [row for table in recipe.tables for row in table.operands.values()]
    for name in ("rounding", "scale_rule"):
        if name in options and any(name in row.chosen for row in rows):
            raise MqoError(
                f"--{name.replace('_', '-')} cannot be combined with the recipe {recipe.name}, "
                "which sets it for each operand",
                expected="one of the two",
                help="A FILE.toml of yours can set any: `mqo recipe show` prints one to start from",
            )


def _check_options(options: dict[str, Any], without: Sequence[str], experiment: Experiment) -> None:
    """Raise MqoError for options that need a patch that is left out, or that change nothing."""
    if "fused_attention" in without and options.get("unnormalized_probs"):
        flag = OPTIONS["unnormalized_probs"].flag
        raise MqoError(
            f"{flag} needs the patch fused_attention, which --without-patch leaves out",
            expected="one of them",
        )
    saves = experiment.training.save_interval or experiment.checkpoint
    if options.get("keep_checkpoints") and not (saves or "--save" in experiment.extra_flags):
        raise MqoError(
            f"{OPTIONS['keep_checkpoints'].flag} changes nothing: this run saves no checkpoint",
            expected="CHECKPOINT, the first argument, or a training configuration that saves",
        )


def _kept(checkpoint: Path | None, training: Training) -> int:
    """Return the number of checkpoints to keep, 0 for all.

    A folder with more than the default number was filled on purpose, so all stay; a killed run
    leaves one more.
    """
    there = len(list(checkpoint.glob("iter_*"))) if checkpoint else 0
    return 0 if there > training.keep_last + 1 else training.keep_last


def _mode(
    quantization: str, linear: str | None, attention: str | None, attention_gemms: AttentionGemms
) -> Mode | None:
    """Return the mode with its changes; None for the types in the tree's source."""
    if quantization != SOURCE:
        mode = tables.pick(tables.modes(), "quantization mode", quantization)
        return tables.changed(mode, linear, attention)
    if linear or attention:
        raise MqoError(
            f"The quantization '{SOURCE}' takes all types from the tree",
            expected="no other type with it",
            help="`script/quant_type_modifier.py` changes the types in the tree",
        )
    if attention_gemms != "forward":
        raise MqoError(
            f"--attention-gemms {attention_gemms} changes nothing: the types are those in the tree",
            expected=f"a mode other than {SOURCE}, or --attention-gemms forward",
        )
    return None
