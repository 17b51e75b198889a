"""Make the configurations of a sweep from lists of names and globs, and check them."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mqo.errors import MqoError
from mqo.launch.config import RunConfig, resolve
from mqo.launch.effects import PATTERNS, quant_config
from mqo.launch.models import expand_models
from mqo.launch.naming import folder_part
from mqo.launch.own_types import NO_OWN_TYPES, OwnTypes
from mqo.launch.prepare import check_config
from mqo.launch.variants import (
    FORWARD,
    GemmChoice,
    Variant,
    check_set_once,
    variants,
    with_plugins,
)
from mqo.matrix import tables
from mqo.quant.table import unread_patterns


@dataclass(frozen=True)
class Job:
    """A run of a sweep; `name` is also its run folder's name."""

    name: str
    config: RunConfig

    @property
    def label(self) -> str:
        """Return the name for tables, with the versions of the user's types."""
        quant = self.config.quantization
        types = quant.all_types
        digests = [row.version for row in quant.formats.values()]
        digests += [p.row().version for p in quant.plugins if p.name in types]
        name = " ".join([self.name, *dict.fromkeys(digests)])
        return name + self.config.mode_label.removeprefix(quant.name)

    @property
    def digest(self) -> str:
        """Return a hash that distinguishes runs of the same name."""
        return hashlib.sha256(self.config.model_dump_json().encode()).hexdigest()[:16]

    @property
    def data_key(self) -> tuple:
        """Return the key of the shuffle index; the first run with a key writes the index."""
        experiment = self.config.experiment
        return (
            experiment.dataset,
            experiment.data_prefix,
            experiment.training,
            experiment.extra_flags,
        )


def jobs(
    models: str,
    datasets: str | None,
    modes: str | None,
    training: str,
    *,
    recipes: str = "",
    axes: Sequence[str] = (),
    seeds: Sequence[int] = (),
    extra_flags: tuple[str, ...] = (),
    own: OwnTypes = NO_OWN_TYPES,
    gemms: GemmChoice = FORWARD,
    **rest: Any,
) -> list[Job]:
    """Return a job for each combination of model, dataset, seed and way to quantize.

    Each list is 'all', or names and globs separated by commas; UnknownNameError lists the valid
    names, but with a `data_prefix` any dataset name is valid, and a model may be a path. For
    `modes`, `recipes` and `axes` see mqo.launch.variants. `own` are the user's types;
    MqoError if no job uses a file or an option of them. `rest` is passed to `resolve`; a variant
    may override it. Neighbors in the list have different datasets: see `data_key`.
    """
    check_set_once(axes, own.options)
    ways = variants(modes, recipes, axes, gemms)
    each_seed: list[int | None] = [*dict.fromkeys(seeds)] or [None]
    product = itertools.product(
        expand_models(models),
        _with_settings(ways, own, gemms, rest),
        each_seed,
        _datasets(datasets, rest.get("data_prefix")),
    )
    result: dict[str, Job] = {}
    for model, way, seed, dataset in product:
        flags = extra_flags if seed is None else (*extra_flags, "--seed", str(seed))
        config = resolve(model, dataset, way.mode, training, extra_flags=flags, **way.rest)
        experiment = config.experiment
        name = f"{folder_part(experiment.model_name)}_{experiment.dataset.name}_{way.name}"
        name += "" if seed is None else f"_seed{seed}"
        _add(result, Job(name, config))
    planned = [job.config.quantization for job in result.values()]
    own.refuse_unused(planned)
    return list(result.values())


def _with_settings(
    ways: Sequence[Variant], own: OwnTypes, gemms: GemmChoice, rest: Mapping[str, Any]
) -> list[Variant]:
    """Return the variants with the settings of all runs that apply to them.

    Raises:
        MqoError: a choice of GEMMs or a pattern of layers applies to none of them.
    """
    gemms.refuse_unread(ways)
    patterns = {name: _patterns_read(ways, name, rest.get(name, ()), gemms) for name in PATTERNS}
    return [
        replace(
            way,
            rest={
                **rest,
                **gemms.fields,
                **{name: read[way.name] for name, read in patterns.items()},
                **way.rest,
            },
        )
        for way in with_plugins(ways, own)
    ]


def _add(jobs: dict[str, Job], job: Job) -> None:
    """Add a job by its name; MqoError if another one has the name."""
    other = jobs.setdefault(job.name, job)
    if other is not job and other.digest != job.digest:
        raise MqoError(
            f"Two different runs would be called {job.name}",
            expected="recipes or values that differ in letters, digits and _.+-",
        )


def _patterns_read(
    ways: Sequence[Variant], option: str, patterns: Sequence[str], gemms: GemmChoice
) -> dict[str, tuple[str, ...]]:
    """Return {variant: patterns for sites that it quantizes}; MqoError for an unused pattern."""
    patterns_read = {}
    for way in ways:
        recipe = way.rest.get("recipe")
        types = gemms.types(way.mode, way.rest)
        types |= recipe.types.model_dump() if recipe else {}
        unread = unread_patterns(quant_config(types, {option: list(patterns)}), option)
        kept = tuple(text for text in patterns if text not in unread)
        if option == "include" and not kept and {*types.values()} != {tables.NONE}:
            # Without them it would quantize all layers; with them its check refuses it.
            kept = tuple(patterns)
        patterns_read[way.name] = kept
    for pattern in patterns:
        if not any(pattern in read for read in patterns_read.values()):
            raise MqoError(
                f"--{option} {pattern} changes nothing: no run quantizes a GEMM at its sites",
                expected="a pattern for sites that some mode quantizes",
            )
    return patterns_read


def _datasets(given: str | None, prefix: object) -> Sequence[str | None]:
    """Return dataset names; with the user's own data any names, or None for the file's name."""
    if prefix is None:
        return tables.expand("dataset", tables.datasets(), given or tables.ALL)
    if given is None:
        return [None]
    own = [] if given == tables.ALL else [name.strip() for name in given.split(",")]
    return own or list(tables.datasets())


def check(jobs: Sequence[Job]) -> None:
    """Raise MqoError that lists all jobs that cannot run, with reasons."""
    experiments = [job.config.experiment for job in jobs]
    if len({experiment.dataset.name for experiment in experiments if experiment.data_prefix}) > 1:
        raise MqoError(
            "--data-prefix or --text was given with several datasets",
            expected="one name in --dataset",
        )
    bad = []
    for job in jobs:
        try:
            check_config(job.config)
        except MqoError as error:
            bad.append((job, error))
    if not bad:
        return
    if len(bad) == len(jobs) and len({str(error) for _, error in bad}) == 1:
        raise bad[0][1]
    raise MqoError(
        f"{len(bad)} of {len(jobs)} runs cannot start, so none was started",
        help="Leave them out, or correct the faults listed below",
        detail="\n".join(f"{job.name}: {error}" for job, error in bad),
    )
