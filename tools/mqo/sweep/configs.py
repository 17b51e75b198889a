"""Makes the configurations of a sweep from lists of names and globs, and checks them."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mqo.errors import MqoError
from mqo.launch.config import RunConfig, resolve
from mqo.launch.options import OPTIONS, split
from mqo.launch.prepare import check_config
from mqo.matrix import tables
from mqo.recipes.recipe import read


@dataclass(frozen=True)
class Job:
    """A run of a sweep, under the name that its run folder has."""

    name: str
    config: RunConfig

    @property
    def label(self) -> str:
        """Return the name as tables show it."""
        return self.name + self.config.mode_label.removeprefix(self.config.quantization.name)

    @property
    def digest(self) -> str:
        """Return what tells two runs of one name apart."""
        return hashlib.sha256(self.config.model_dump_json().encode()).hexdigest()[:16]

    @property
    def data_key(self) -> tuple:
        """Return the key of the index of shuffles; the first run with a key writes the index."""
        of = self.config.experiment
        return of.dataset, of.data_prefix, of.training, of.extra_flags


@dataclass(frozen=True)
class Variant:
    """A way to quantize: what run folders call it, its mode, and what `resolve` takes beside."""

    name: str
    mode: str
    rest: Mapping[str, object]


def jobs(
    models: str,
    datasets: str,
    modes: str | None,
    training: str,
    *,
    recipes: str = "",
    axes: Sequence[str] = (),
    seeds: Sequence[int] = (),
    extra_flags: tuple[str, ...] = (),
    **rest: object,
) -> list[Job]:
    """Return a job for each combination of model, dataset, seed and way to quantize.

    Each list is 'all', or names and globs with commas between; UnknownNameError lists the valid
    names. `modes` None are those that have scripts, beside recipes bf16 alone. `axes` are texts
    'OPTION=VALUE,VALUE'. `rest` goes to `resolve`. Neighbors have different datasets: see
    `data_key`.
    """
    product = itertools.product(
        tables.expand("model", tables.models(), models),
        variants(modes, recipes, axes),
        list(dict.fromkeys(seeds)) or [None],
        tables.expand("dataset", tables.datasets(), datasets),
    )
    made = []
    for model, how, seed, dataset in product:
        flags = extra_flags if seed is None else (*extra_flags, "--seed", str(seed))
        more = rest | how.rest
        config = resolve(model, dataset, how.mode, training, extra_flags=flags, **more)
        name = f"{model}_{dataset}_{how.name}" + ("" if seed is None else f"_seed{seed}")
        made.append(Job(name, config))
    return made


def variants(modes: str | None, recipes: str, axes: Sequence[str]) -> list[Variant]:
    """Return the modes, each with each combination of the axes' values, and then the recipes.

    What quantizes nothing has no options, and a recipe its own.
    """
    if modes is None:
        scripts = ",".join(mode.name for mode in tables.script_modes())
        modes = tables.UNQUANTIZED if recipes else scripts
    chosen = dict(_axis(text) for text in axes)
    made = []
    for mode in tables.expand_modes(modes):
        values = [()] if mode == tables.UNQUANTIZED else itertools.product(*chosen.values())
        for combination in values:
            of = dict(zip(chosen, combination, strict=False))
            name = "_".join([mode, *(f"{k.replace('_', '-')}-{v}" for k, v in of.items())])
            made.append(Variant(name, mode, of))
    for name in filter(None, map(str.strip, recipes.split(","))):
        recipe = read(name)
        made.append(
            Variant(
                recipe.label.replace(" ", "-"),
                tables.UNQUANTIZED,
                {"recipe": recipe, "gemms": "fprop"},
            )
        )
    return made


def _axis(text: str) -> tuple[str, list[str | int]]:
    """Return an option's name and its values, of 'rounding=nearest-even,stochastic'."""
    name, _, listed = text.partition("=")
    name = name.strip().replace("-", "_")
    valid = [key for key, one in split(OPTIONS)[0].items() if not one.many and one.kind is not bool]
    tables.check_choice("option of the quantizers for --axis", name, tuple(valid))
    words = list(dict.fromkeys(word for word in map(str.strip, listed.split(",")) if word))
    if not words:
        raise MqoError(f"--axis {text} has no values", expected="such as rounding=up,down")
    if OPTIONS[name].kind is not int:
        return name, words
    if strange := next((word for word in words if not word.isdecimal()), None):
        raise MqoError(f"--axis {text}: '{strange}' is no whole number", expected="such as 16,32")
    return name, [int(word) for word in words]


def check(jobs: Sequence[Job]) -> None:
    """Raise MqoError with all jobs that cannot run, each with its reason."""
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
        help="Leave them out, or change what is said below",
        detail="\n".join(f"{job.name}: {error}" for job, error in bad),
    )
