"""The typed tables behind models.toml, datasets.toml, modes.toml and training.toml."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict

from mqo.errors import UnknownNameError

HERE = Path(__file__).parent
Dtype = Literal["fp32", "bf16", "fp16"]
Gemms = Literal["fprop", "all"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
# The sites that the linear type goes to; attention sites are named as they are.
LINEAR_SITES: Mapping[Gemms, tuple[str, ...]] = {
    "fprop": ("fprop",),
    "all": ("fprop", "dgrad", "wgrad"),
}
SITES = ("fprop", "dgrad", "wgrad", "qk", "pv")
NONE = "none"


class Row(BaseModel):
    """A row of a table: frozen, and no key that is not a field."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str


class Model(Row):
    """A GPT as published. Sizes in elements; `parameters` is the total of the built model."""

    published_as: str
    parameters: int
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    tied_embeddings: bool
    norm_epsilon: float
    rotary_base: int
    rope_scaling_factor: int
    train_sequence: int

    def shrunk(self, width: int, depth: int) -> Model:
        """The same kind of model, `width` times narrower and `depth` times shallower.

        Heads and query groups shrink alike, by as much as leaves a whole group, so their ratio and
        thereby the kind of attention stays; what is left of the factor narrows the heads.
        """
        by = min(width, self.num_query_groups // 2)
        return self.model_copy(
            update={
                "num_layers": self.num_layers // depth,
                "hidden_size": self.hidden_size // width,
                "ffn_hidden_size": self.ffn_hidden_size // width,
                "num_attention_heads": self.num_attention_heads // by,
                "num_query_groups": self.num_query_groups // by,
            }
        )


class Dataset(Row):
    """A corpus; `sample` says whether `mqo` can make a small one of it."""

    published_as: str
    sample: bool


class Mode(Row):
    """What is quantised: the type of the linear layers' GEMMs, of QK, and of PV."""

    linear: str = NONE
    qk: str = NONE
    pv: str = NONE
    scripts: bool

    def types(self, gemms: Gemms = "fprop") -> dict[str, str]:
        """{site: type} for all five sites."""
        types = dict.fromkeys(SITES, NONE) | {"qk": self.qk, "pv": self.pv}
        return types | dict.fromkeys(LINEAR_SITES[gemms], self.linear)


class Training(Row):
    """A training configuration. Batches in sequences, `sequence` in tokens, `samples` in sequences.

    `shrink_*` divide the model's width and depth.
    """

    shrink_width: int = 1
    shrink_depth: int = 1
    dtype: Dtype
    micro_batch: int
    global_batch: int
    sequence: int
    samples: int
    lr: float
    min_lr: float
    warmup_fraction: float
    eval_interval: int
    eval_iters: int
    log_interval: int

    @property
    def is_smoke(self) -> bool:
        """Whether the model is shrunk: such a run is for trying, on the dataset's sample."""
        return self.shrink_width > 1

    @property
    def iterations(self) -> int:
        """Optimizer steps."""
        return self.samples // self.global_batch


RowT = TypeVar("RowT", bound=Row)


@functools.cache
def models() -> dict[str, Model]:
    """All models, by name."""
    return _rows(Model, _load("models.toml"))


@functools.cache
def datasets() -> dict[str, Dataset]:
    """All datasets, by name."""
    return _rows(Dataset, _load("datasets.toml"))


@functools.cache
def trainings() -> dict[str, Training]:
    """All training configurations, by name."""
    return _rows(Training, _load("training.toml"))


@functools.cache
def modes() -> dict[str, Mode]:
    """All modes, by name: each family of modes.toml for each type."""
    table = _load("modes.toml")
    found: dict[str, Mode] = {}
    for family in table["family"]:
        for quant_type in table["types"] if "{type}" in family["name"] else [NONE]:
            name = family["name"].format(type=quant_type)
            sites = dict.fromkeys(family["sites"], quant_type)
            found[name] = Mode(name=name, scripts=family["scripts"], **sites)
    return found


def quant_types() -> tuple[str, ...]:
    """The types that a mode may name, 'none' apart."""
    return tuple(_load("modes.toml")["types"])


def pick(table: Mapping[str, RowT], kind: str, name: str) -> RowT:
    """The row called `name`; UnknownNameError lists the valid ones."""
    check_choice(kind, name, table)
    return table[name]


def check_choice(kind: str, name: object, valid: Collection[object]) -> None:
    """UnknownNameError unless `name` is one of `valid`."""
    if name not in valid:
        raise UnknownNameError(kind, str(name), [v for v in valid if v is not None])


def _load(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


def _rows(kind: type[RowT], table: Mapping[str, Any]) -> dict[str, RowT]:
    return {name: kind(name=name, **row) for name, row in table.items()}
