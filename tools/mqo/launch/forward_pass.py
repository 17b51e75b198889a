"""Decide how the forward pass of a saved model is quantized."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mqo.errors import CheckpointError, FormatError, PluginError
from mqo.launch.checkpoints import describe, require_files, require_tracker
from mqo.launch.hf_source import refuse_hf_folder
from mqo.launch.origin import is_own
from mqo.launch.own_formats import declare_formats, used_formats
from mqo.launch.own_types import OwnTypes
from mqo.launch.plugins import RunPlugin, declare_rows, labels, plugins_of, used
from mqo.matrix import tables
from mqo.megatron.run.files import TRACKER
from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.quant.formats import ATTENTION_BACKWARD, QUANT_TYPES
from mqo.quant.own_formats import FormatRow
from mqo.run_records import QuantToml, damaged, parsed
from mqo.runs import RunFolder, checkpoints_of

AS_TRAINED = "as trained"
BACKWARD = ("dgrad", "wgrad", *ATTENTION_BACKWARD)  # sites that no evaluation runs


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint to run: its name in tables, its folder, and its run's quant.toml if any."""

    name: str
    folder: Path
    quant_config: Path | None

    @classmethod
    def find(cls, path: Path) -> SavedModel:
        """Return the model at `path`: a run, a folder of checkpoints, or one iteration's folder.

        Raises:
            CheckpointError: it holds no checkpoint.
        """
        path = path.resolve()
        folder = checkpoints_of(path)
        if not (folder / "metadata.json").is_file():
            if not (folder / TRACKER).is_file():
                refuse_hf_folder(path, CheckpointError)
            expected = f"a run that saved, a folder with {TRACKER}, or the folder of an iteration"
            require_tracker(folder, CheckpointError, expected)
        else:
            require_files(folder, CheckpointError)
        near = (path, *folder.parents[:2])
        options = [RunFolder(root).quant_config for root in near]
        config = next((file for file in options if file.is_file()), None)
        return cls(config.parent.name if config else path.name, folder, config)


@dataclass(frozen=True)
class ForwardPass:
    """How a forward pass is quantized.

    `mode` is the name of a mode, `types` are {site: type}, `rows` are those of a recipe, `formats`
    are the user's formats, and `plugins` are the custom quantizers. `options` are the quantizers';
    None for those of the checkpoint's run.
    """

    mode: str
    types: dict[str, str]
    rows: dict[str, Any]
    plugins: tuple[RunPlugin, ...] = ()
    formats: Mapping[str, FormatRow] = field(default_factory=dict)
    options: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """Return the mode's name, with the versions of the user's formats and quantizers."""
        return " ".join([self.mode, *labels(self)])

    @property
    def all_types(self) -> set[str]:
        """Return the types of the sites, and of the operands and layers of a recipe."""
        rows = [*self.rows.get("operands", {}).values(), *self.rows.get("rules", ())]
        recipes = self.rows.get("recipes", {}).values()
        rows += [row for recipe in recipes for row in recipe.get("operands", {}).values()]
        types = {kind for recipe in recipes for kind in recipe["types"].values()}
        return {*self.types.values(), *types, *(str(row.get("quant_type")) for row in rows)}


def forward_passes(
    tree: Tree,
    models: Iterable[SavedModel],
    modes: Sequence[str],
    own: OwnTypes,
) -> list[tuple[SavedModel, ForwardPass]]:
    """Return each model with each mode, in this order.

    Raises:
        CheckpointError: a checkpoint cannot be used, or needs a quantizer whose code may be another
            person's.
        PluginError: a file of quantizers cannot be used, or changes nothing.
        FormatError: a file of formats changes nothing, or has other numbers than a checkpoint's.
    """
    given = plugins_of(own.plugins, own.options)
    pairs = [
        (model, _forward_pass(tree, model, mode, given, own)) for model in models for mode in modes
    ]
    own.refuse_unused([quant for _, quant in pairs])
    return pairs


def _forward_pass(
    tree: Tree,
    model: SavedModel,
    mode: str,
    given: tuple[RunPlugin, ...],
    own: OwnTypes,
) -> ForwardPass:
    """Return how a mode quantizes the GEMMs of a forward pass.

    For AS_TRAINED that is recorded in the checkpoint and in its run's recipe. Without a record
    nothing is quantized: no quantized training wrote the checkpoint.
    """
    recorded = _recorded_formats(model)
    if mode != AS_TRAINED:
        types = _forward(tables.pick(tables.modes(), "quantization mode", mode).types())
        names = {*types.values()}
        formats = used_formats({**recorded, **own.rows}, names)
        return ForwardPass(mode, types, {}, used(given, names), formats)
    plugins = _recorded(model, given)
    facts = describe(tree.root, model.folder)
    types = _forward(facts["types"])
    if facts["rows"] and model.quant_config is None:
        raise CheckpointError(
            f"{model.folder} was trained with a recipe or with patterns of layers, and there is no "
            "quant.toml next to it",
            expected="a copy of its quant.toml in that folder, or the run itself",
            help="To run it without them, name a mode",
        )
    formats = recorded if model.quant_config else {**own.rows}
    _check_known(model, types, (*formats, *(plugin.name for plugin in plugins)))
    if model.quant_config is None:
        _check_versions(model, plugins, facts["plugins"])
    rows = recipe_rows(model.quant_config, types)
    quant = ForwardPass(_mode_of(types, rows), types, rows)
    formats = used_formats(formats, quant.all_types)
    _check_numbers(model, own, facts["formats"], formats)
    quant = replace(quant, plugins=used(plugins, quant.all_types), formats=formats)
    _refuse_foreign(model, quant.plugins, given)
    return quant


def _recorded(model: SavedModel, given: tuple[RunPlugin, ...]) -> tuple[RunPlugin, ...]:
    """Return the quantizers of a model's run, which become types; given ones replace them."""
    config, by_name = model.quant_config, {plugin.name: plugin for plugin in given}
    for name, row in quant_toml_of(config).plugins.items():
        assert config is not None  # it has rows
        try:
            source = config.parent / str(row.get("file"))
            was = RunPlugin.model_validate({**row, "name": name, "source": source})
            declare_rows([was])
        except ValueError as error:
            raise damaged(config, error) from None
        if name not in by_name:
            by_name[name] = was
            continue
        options = was.options | by_name[name].options
        by_name[name] = by_name[name].model_copy(update={"options": options})
        try:
            declare_rows([by_name[name]])
        except ValueError as error:
            raise PluginError(
                f"{by_name[name].source} does not fit {model.name}: {error}",
                expected=f"a version of {name} with the options of that run",
            ) from None
    return tuple(by_name.values())


def _recorded_formats(model: SavedModel) -> dict[str, FormatRow]:
    """Return the user's formats of a model's run, which become types."""
    try:
        return declare_formats(quant_toml_of(model.quant_config).formats)
    except ValueError as error:
        assert model.quant_config is not None  # it has rows
        raise damaged(model.quant_config, error) from None


def _check_numbers(
    model: SavedModel,
    own: OwnTypes,
    recorded: Mapping[str, str],
    used: Mapping[str, FormatRow],
) -> None:
    """Raise FormatError for a format with other numbers than in the training of the checkpoint."""
    for name, row in used.items():
        file, was = own.file_of(name), recorded.get(name, row.digest)
        now = own.rows[name] if file else row
        if was != now.digest:
            raise FormatError(
                f"{model.folder} was trained with {name} {was[: len(row.version)]}, and "
                f"{file or 'another file'} has {now.version}",
                expected="the row with which it was trained",
                help="To run it in another way, name a mode",
            )


def _check_known(model: SavedModel, types: Mapping[str, str], own: Iterable[str]) -> None:
    """Raise CheckpointError for a type that is neither a type of mqo nor among `own`."""
    if unknown := sorted({*types.values()} - {*QUANT_TYPES, *own}):
        raise CheckpointError(
            f"{model.folder} was trained with the type {unknown[0]}, which is unknown here",
            expected="a type of this release, --formats FILE with the format of this name, or "
            "--plugin FILE with the quantizer",
            help="To run it in another way, name a mode",
        )


def _check_versions(
    model: SavedModel, plugins: Iterable[RunPlugin], recorded: Mapping[str, str]
) -> None:
    """Raise CheckpointError for a quantizer of another version, or with other options."""
    for plugin in plugins:
        was, now = recorded.get(plugin.name), plugin.row().text
        if was is not None and was != now:
            raise CheckpointError(
                f"{model.folder} was trained with {plugin.name}, {was}, and {plugin.source} has "
                f"{now}",
                expected="that version of the file, and its options by --plugin-option",
                help="To run it in another way, name a mode",
            )


def _refuse_foreign(
    model: SavedModel, plugins: Iterable[RunPlugin], given: tuple[RunPlugin, ...]
) -> None:
    """Raise CheckpointError if the code of another person's run would be run."""
    named = {plugin.source for plugin in given}
    for plugin in plugins:
        if plugin.source in named:
            continue
        assert model.quant_config is not None  # it names the quantizer
        run = RunFolder(model.quant_config.parent)
        if not is_own(Project.here(), run):
            raise CheckpointError(
                f"{model.name} was trained with the quantizer {plugin.name}, and {run.root} was "
                "not made here, or its code was changed since",
                expected="--plugin FILE with the quantizer, whose code then runs",
                help=f"Read {plugin.source} like any foreign program first",
            )


def _mode_of(types: Mapping[str, str], rows: Mapping[str, Any]) -> str:
    """Return the mode with these types in the forward pass; AS_TRAINED if there is none."""
    if not rows:
        for name, known in tables.modes().items():
            if _forward(known.types()) == types:
                return name
    return AS_TRAINED


def _forward(types: Mapping[str, str]) -> dict[str, str]:
    return {site: types.get(site, tables.NONE) for site in tables.SITES if site not in BACKWARD}


def recipe_rows(config: Path | None, types: Mapping[str, str]) -> dict[str, Any]:
    """Return the rows of a run's recipe for `quant_toml`, if `types` occur in its schedule.

    Those of the backward pass are left out: their source is not in a forward pass either.
    """
    record = quant_toml_of(config)
    for site, quant_type in _forward(types).items():
        later = re.findall(r"\w+", record.schedule.get(site, ""))
        if quant_type not in (tables.NONE, record.asked.get(site, tables.NONE), *later):
            return {}
    recipes = {
        name: {key: _forward_rows(rows) for key, rows in table.items()}
        for name, table in record.recipes.items()
    }
    rows = {"operands": _forward_rows(record.operands), "rules": record.rules, "recipes": recipes}
    return {name: row for name, row in rows.items() if row}


def _forward_rows(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of sites, or of their operands, in a forward pass."""
    return {name: row for name, row in rows.items() if name.partition(".")[0] not in BACKWARD}


def quant_toml_of(config: Path | None) -> QuantToml:
    """Return the content of a quant.toml; an empty one if `config` is None."""
    return parsed(config, QuantToml) if config else QuantToml()
