"""The typed tables of models.toml, datasets.toml, modes.toml and training.toml."""

import fnmatch
import functools
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from mqo.errors import UnknownNameError
from mqo.quant import formats

HERE = Path(__file__).parent
Dtype = Literal["fp32", "bf16", "fp16"]
Gemms = Literal["fprop", "all"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
# The sites that the linear type goes to; attention sites are named as they are.
SITES = tuple(formats.SITES)
LINEAR_SITES: Mapping[Gemms, tuple[str, ...]] = {
    "fprop": ("fprop",),
    "all": tuple(name for name, site in formats.SITES.items() if site.layer == formats.LINEAR),
}
ATTENTION_SITES = tuple(site for site in SITES if site not in LINEAR_SITES["all"])
NONE = formats.NONE
UNQUANTIZED = "bf16"  # the mode; a run's dtype is another choice
ALL = "all"
# Shrunk sizes are multiples of it where they can be: no MX block of that length is then cut short.
# It belongs to no format: another format does not change the models.
BLOCK = 32


class Part(BaseModel):
    """A part of a row: frozen, and no key that is not a field."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(Part):
    """A row of a table."""

    name: str


class Llama3Rope(Part):
    """Llama 3's scaling of rotary frequencies; `original` is the context in tokens before it.

    Upstream takes `factor` from a flag and has the others as its defaults.
    """

    factor: int
    low: int
    high: int
    original: int


class Yarn(Part):
    """YaRN's scaling of rotary frequencies; `original` is the context in tokens before it.

    Upstream takes `factor` and the mscales from flags and has the others as its defaults.
    """

    factor: int
    beta_fast: int
    beta_slow: int
    mscale: float
    mscale_all_dim: float
    original: int


class Mla(Part):
    """Multi-latent attention without a query rank; heads are of `qk_head_dim` without positions."""

    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int

    def narrowed(self, width: int, heads: int) -> Self:
        """Return it with its rank `width` times smaller and its heads `heads` times."""
        return type(self)(
            kv_lora_rank=self.kv_lora_rank // width,
            qk_head_dim=self.qk_head_dim // heads,
            qk_pos_emb_head_dim=self.qk_pos_emb_head_dim // heads,
            v_head_dim=self.v_head_dim // heads,
        )


class Moe(Part):
    """Experts after the first `dense_layers`: `topk` routed ones per token, and the shared ones.

    Softmax scores are used without renormalization over the top-k; `aux_loss` is the
    coefficient of the loss that balances the experts in each sequence.
    """

    dense_layers: int
    num_experts: int
    topk: int
    shared_experts: int
    expert_ffn_size: int
    aux_loss: float

    @property
    def shared_ffn_size(self) -> int:
        """Return the size of all shared experts together, which are one wide MLP."""
        return self.shared_experts * self.expert_ffn_size

    def narrowed(self, width: int) -> Self:
        """Return `width` times fewer and narrower experts, at least two to choose from."""
        smaller = {
            "num_experts": self.num_experts // width,
            "topk": max(2, self.topk // width),
            "expert_ffn_size": _blocks(self.expert_ffn_size // width),
        }
        return self.model_copy(update=smaller)


class Shape(Part):
    """What upstream's model flags say of a GPT. Sizes in elements.

    It has either grouped queries or `mla`.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None
    vocab_size: int
    tied_embeddings: bool
    norm_epsilon: float
    rotary_base: int
    rope: Llama3Rope | Yarn | None = None
    mla: Mla | None = None
    moe: Moe | None = None

    @model_validator(mode="after")
    def _one_attention(self) -> Self:
        if (self.num_query_groups is None) == (self.mla is None):
            raise ValueError("either num_query_groups or mla must be given")
        if self.rope and isinstance(self.rope, Yarn) != (self.mla is not None):
            raise ValueError("upstream's flags give yarn to mla, and Llama 3's scaling to others")
        return self


class Model(Shape, Row):
    """A GPT as published; `parameters` is the total of the built model.

    `train_sequence` is in tokens, the longest that the training configurations train it at.
    """

    published_as: str
    parameters: int
    train_sequence: int

    def shrunk(self, width: int, depth: int) -> Self:
        """Return the same kind of model, `width` times narrower and `depth` times shallower.

        Heads become fewer and narrower, together by `width`: their ratio to query groups or to the
        parts of a latent head, and thereby the kind of attention, stays.
        """
        if (width, depth) == (1, 1):
            return self
        fewer = self._fewer_heads(width)
        return self.model_copy(
            update={
                "num_layers": self.num_layers // depth,
                "hidden_size": self.hidden_size // width,
                "ffn_hidden_size": _blocks(self.ffn_hidden_size // width),
                "num_attention_heads": self.num_attention_heads // fewer,
                "num_query_groups": self.num_query_groups and self.num_query_groups // fewer,
                "mla": self.mla and self.mla.narrowed(width, width // fewer),
                "moe": self.moe and self.moe.narrowed(width),
            }
        )

    def _fewer_heads(self, width: int) -> int:
        """Return how many times fewer heads a model has that is `width` times narrower."""
        if self.mla is not None:
            # The smallest part of a head narrows to one block; what is left leaves out heads.
            return width // min(width, self.mla.qk_pos_emb_head_dim // BLOCK)
        assert self.num_query_groups is not None
        return min(width, self.num_query_groups // 2)  # as much as leaves a whole group


class Dataset(Row):
    """A corpus; `sample` says whether `mqo` can make a small one of it."""

    published_as: str
    sample: bool


class Mode(Row):
    """What is quantized: the type of the linear layers' GEMMs, of QK, and of PV.

    `scripts` says that it has scripts; `front_end` that flash_attention_config.py offers it.
    """

    linear: str = NONE
    qk: str = NONE
    pv: str = NONE
    scripts: bool = False
    front_end: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the types of its linear layers, QK and PV: equal for equal modes."""
        return self.linear, self.qk, self.pv

    def types(self, gemms: Gemms = "fprop") -> dict[str, str]:
        """Return {site: type} for all five sites."""
        types = dict.fromkeys(SITES, NONE) | {"qk": self.qk, "pv": self.pv}
        return types | dict.fromkeys(LINEAR_SITES[gemms], self.linear)


class Family(Row):
    """The modes that quantize `sites`, with {type} in their name for the type; or one mode.

    `scripts`: those of documented types have scripts. `front_end`: flash_attention_config.py
    offers them.
    """

    sites: tuple[str, ...]
    scripts: bool
    front_end: bool = False

    @property
    def types(self) -> tuple[str, ...]:
        """Return the types that it has a mode for."""
        return quant_types() if self.sites else (NONE,)

    def mode(self, quant_type: str) -> str:
        """Return the name of the mode of that type."""
        return self.name.format(type=quant_type)


def mode_label(mode: str, dtype: str) -> str:
    """Return a mode's name for tables and plots.

    The mode `bf16` quantizes nothing in any dtype; the label says so if the run has another dtype.
    """
    bare = mode != UNQUANTIZED or dtype in ("bf16", "bfloat16")
    return mode if bare else f"{mode} (unquantized)"


class Training(Row):
    """A training configuration. Batches in sequences, `sequence` in tokens, `samples` in sequences.

    `shrink_*` divide the model's width and depth. `save_interval` is in iterations; 0 saves
    nothing, or at the end where a folder for checkpoints is given. `keep_last` is how many
    checkpoints stay, 0 for all. `held_out` is the share of the documents that validation has.
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
    save_interval: int
    keep_last: int = 0
    held_out: float = 0.1

    @property
    def is_smoke(self) -> bool:
        """Return whether the model is shrunk: such a run is for trying, on the dataset's sample."""
        return self.shrink_width > 1

    @property
    def iterations(self) -> int:
        """Return optimizer steps."""
        return self.samples // self.global_batch


PickedT = TypeVar("PickedT")
RowT = TypeVar("RowT", bound=Row)
SCRIPT_TYPES = (NONE, *(name for name, row in formats.FORMATS.items() if row.scripts))
TYPES_T = f"T is one of {', '.join(formats.FORMATS)}"


@functools.cache
def models() -> dict[str, Model]:
    """Return all models, by name."""
    return _rows(Model, "models.toml")


@functools.cache
def datasets() -> dict[str, Dataset]:
    """Return all datasets, by name."""
    return _rows(Dataset, "datasets.toml")


@functools.cache
def trainings() -> dict[str, Training]:
    """Return all training configurations, by name."""
    return _rows(Training, "training.toml")


@functools.cache
def modes() -> dict[str, Mode]:
    """Return all modes, by name: each family of modes.toml for each type."""
    found: dict[str, Mode] = {}
    for family in families():
        for quant_type in family.types:
            sites = dict.fromkeys(family.sites, quant_type)
            scripts = family.scripts and quant_type in SCRIPT_TYPES
            name = family.mode(quant_type)
            shared: dict[str, Any] = {"front_end": family.front_end, **sites}
            found[name] = Mode(name=name, scripts=scripts, **shared)
    return found


@functools.cache
def families() -> tuple[Family, ...]:
    """Return all families of modes."""
    return tuple(Family(**row) for row in _load("modes.toml")["family"])


def script_modes(types: Collection[str] | None = None) -> list[Mode]:
    """Return the modes that scripts are written of: the documented ones, or those of `types`."""
    if types is None:
        return [mode for mode in modes().values() if mode.scripts]
    typed = [family for family in families() if family.scripts and family.sites]
    return [modes()[family.mode(name)] for family in typed for name in types]


def patterns(names: Collection[str]) -> list[str]:
    """Return `names`, with T for the type if they have the modes of a family for all types.

    Names of types do not change.
    """
    whole = [f for f in families() if f.sites and {f.mode(t) for t in f.types} <= {*names}]
    if not any(family.name != "{type}" for family in whole):
        return list(names)
    short = {family.mode(name): family.mode("T") for family in whole for name in family.types}
    return list(dict.fromkeys(short.get(name, name) for name in names))


def changed(mode: Mode, linear: str | None = None, attention: str | None = None) -> Mode:
    """Return `mode` with another type of the linear layers, or other ones of attention.

    `attention` is a type as in FA_X (only QK), 'none', or a name like qk_pv_X. The result has the
    name of the first equal mode, or else a name after what it quantizes. UnknownNameError lists
    the valid names.
    """
    linear = mode.linear if linear is None else linear
    check_choice("type of linear layers", linear, (*quant_types(), NONE))
    offered = {quant_type: modes()[f"FA_{quant_type}"] for quant_type in quant_types()}
    offered |= {name: m for name, m in modes().items() if m.front_end} | {NONE: modes()["bf16"]}
    source = mode if attention is None else pick(offered, "quantization of attention", attention)
    wanted = Mode(name="", linear=linear, qk=source.qk, pv=source.pv)
    for known in (mode, *modes().values()):
        if known.key == wanted.key:
            return known
    parts = zip(("linear", "qk", "pv"), wanted.key, strict=True)
    name = "_".join(f"{site}_{quant_type}" for site, quant_type in parts if quant_type != NONE)
    return wanted.model_copy(update={"name": name})


def quant_types() -> tuple[str, ...]:
    """Return the types that a mode may name, 'none' apart."""
    return tuple(formats.FORMATS)


def pick(table: Mapping[str, PickedT], kind: str, name: str) -> PickedT:
    """Return the row called `name`; UnknownNameError lists the valid ones."""
    check_choice(kind, name, table)
    return table[name]


def expand_modes(given: str) -> list[str]:
    """Return the modes that `given` means, as in `expand`.

    'all' and a glob mean only modes with scripts, if any match, so that a sweep does not change
    when a format is added.
    """
    first = {family.mode(name) for family in families() for name in SCRIPT_TYPES}
    return expand("quantization mode", modes(), given, first)


def expand(
    kind: str, table: Mapping[str, object], given: str, first: Collection[str] = ()
) -> list[str]:
    """Return the names of `table` that `given` means, in its order, once each.

    It is 'all', or names and globs with commas between; UnknownNameError lists the valid names.
    A glob that matches names in `first` means only these.
    """
    found: dict[str, None] = {}
    for pattern in (part.strip() for part in given.split(",")):
        matches = list(table) if pattern == ALL else fnmatch.filter(table, pattern)
        matches = [name for name in matches if name in first] or matches
        if not matches:
            check_choice(kind, pattern, table)
        found |= dict.fromkeys(matches)
    return list(found)


def check_choice(kind: str, name: object, valid: Collection[object]) -> None:
    """Raise UnknownNameError unless `name` is one of `valid`."""
    if name not in valid:
        names = [str(v) for v in valid if v is not None]
        short = patterns(names)
        raise UnknownNameError(kind, str(name), short, help=TYPES_T if short != names else "")


def check_gemms(name: str) -> Gemms:
    """Return a choice of GEMMs; UnknownNameError for another name."""
    check_choice("choice of GEMMs", name, tuple(LINEAR_SITES))
    return cast(Gemms, name)


def check_dtype(name: str | None) -> Dtype | None:
    """Return a dtype, or None for the default; UnknownNameError for another name."""
    check_choice("dtype", name, (None, *DTYPES))
    return cast(Dtype | None, name)


def _blocks(size: int) -> int:
    """Return `size` without what is less than a block."""
    return max(BLOCK, size // BLOCK * BLOCK)


def _load(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


def _rows(kind: type[RowT], file: str) -> dict[str, RowT]:
    return {name: kind(name=name, **row) for name, row in _load(file).items()}
