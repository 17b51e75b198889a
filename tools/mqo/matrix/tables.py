"""Read models.toml, datasets.toml, modes.toml and training.toml as typed tables."""

import fnmatch
import functools
import math
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast, get_args

from pydantic import model_validator

from mqo.errors import MqoError, UnknownNameError
from mqo.matrix import layer_pattern
from mqo.quant import formats
from mqo.quant.frozen_model import FrozenModel
from mqo.quant.plugins import PLUGINS

HERE = Path(__file__).parent
Dtype = Literal["fp32", "bf16", "fp16"]
Gemms = Literal["fprop", "all"]
AttentionGemms = Literal["forward", "all"]
# Of MLPs: SwiGLU has a gate, and squared ReLU, max(x, 0)², has none.
Activation = Literal["swiglu", "squared_relu"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
# The sites that get the linear type; attention sites have types of their own.
SITES = tuple(formats.SITES)
LINEAR_SITES: Mapping[Gemms, tuple[str, ...]] = {
    "fprop": ("fprop",),
    "all": tuple(name for name, site in formats.SITES.items() if site.layer == formats.LINEAR),
}
MODE_SITES = tuple(site for site in SITES if site not in formats.ATTENTION_BACKWARD)
ATTENTION_SITES = tuple(site for site in SITES if site not in LINEAR_SITES["all"])
NONE = formats.NONE
UNQUANTIZED = "bf16"  # the mode, which is independent of a run's dtype
ALL = "all"
# Shrunk sizes are multiples of this if possible, so that MX blocks of this length are complete. It
# does not depend on the formats, so that a new format does not change the models.
BLOCK = 32


class NamedRow(FrozenModel):
    """A row of a table."""

    name: str


class Llama3Rope(FrozenModel):
    """Llama 3's scaling of rotary frequencies; `original` is the context in tokens before it.

    Upstream has a flag for `factor`; the other values are its defaults.
    """

    factor: int
    low: int
    high: int
    original: int


class Yarn(FrozenModel):
    """YaRN's scaling of rotary frequencies; `original` is the context in tokens before it.

    Upstream has flags for `factor` and the mscales; the other values are its defaults.
    """

    factor: int
    beta_fast: int
    beta_slow: int
    mscale: float
    mscale_all_dim: float
    original: int


class Mla(FrozenModel):
    """Multi-latent attention without a query rank; `qk_head_dim` excludes the rotary part."""

    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int

    def narrowed(self, width: int, heads: int) -> Self:
        """Return a copy with its rank `width` times smaller and its heads `heads` times smaller."""
        return type(self)(
            kv_lora_rank=self.kv_lora_rank // width,
            qk_head_dim=self.qk_head_dim // heads,
            qk_pos_emb_head_dim=self.qk_pos_emb_head_dim // heads,
            v_head_dim=self.v_head_dim // heads,
        )


class Moe(FrozenModel):
    """Experts after the first `dense_layers`: `topk` routed experts per token, and shared experts.

    With `renormalized`, the softmax scores of a token's top-k experts are divided by their sum.
    `aux_loss` is the coefficient of the loss that balances the experts in each sequence.
    """

    dense_layers: int
    num_experts: int
    topk: int
    shared_experts: int
    expert_ffn_size: int
    aux_loss: float
    renormalized: bool = False

    @property
    def shared_ffn_size(self) -> int:
        """Return the total size of the shared experts, which form one wide MLP."""
        return self.shared_experts * self.expert_ffn_size

    def narrowed(self, width: int) -> Self:
        """Return `width` times fewer and narrower experts, with a top-k of at least two."""
        smaller = {
            "num_experts": self.num_experts // width,
            "topk": max(2, self.topk // width),
            "expert_ffn_size": _blocks(self.expert_ffn_size // width),
        }
        return self.model_copy(update=smaller)


class Mamba(FrozenModel):
    """The heads of Mamba-2 layers; `num_groups` groups of them share their projections B and C."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int

    @property
    def inner_size(self) -> int:
        """Return the size of all heads, the input of the output projection."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Return the channels of the convolution: the inputs of the heads, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_dim

    @property
    def projection_size(self) -> int:
        """Return the outputs of the input projection: gates, those channels, and step sizes."""
        return self.inner_size + self.conv_size + self.num_heads

    def narrowed(self, width: int) -> Self:
        """Return `width` times fewer heads, with as many of them in a group if possible."""
        fewer = {
            "num_heads": self.num_heads // width,
            "num_groups": self.num_groups // math.gcd(width, self.num_groups),
        }
        return self.model_copy(update=fewer)

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_groups = {self.num_groups}; valid: a divisor of num_heads")
        return self


class Shape(FrozenModel):
    """The shape of a GPT, or of a HybridModel, as set by upstream's flags. Sizes are in elements.

    It has either grouped queries or `mla`. With grouped queries, `head_dim` is the size of a head
    if heads do not divide `hidden_size` among them; `qkv_bias` adds biases to queries, keys and
    values, and `qk_norm` normalizes each query and key. A `pattern` of layers makes it a
    HybridModel; `num_layers` are its blocks, which may be left out. A model with Mamba layers needs
    no positions; without `rotary_base` it has none.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None
    vocab_size: int
    tied_embeddings: bool
    norm_epsilon: float
    rotary_base: int | None = None
    rope: Llama3Rope | Yarn | None = None
    head_dim: int | None = None
    activation: Activation = "swiglu"
    qkv_bias: bool = False
    qk_norm: bool = False
    mla: Mla | None = None
    moe: Moe | None = None
    mamba: Mamba | None = None
    pattern: str | None = None

    @property
    def blocks(self) -> tuple[str, ...]:
        """Return the symbols of the layers in each block, as `layer_pattern` defines them."""
        if self.pattern is not None:
            return layer_pattern.blocks_of(self.pattern)
        attention = layer_pattern.ATTENTION if self.mla is None else layer_pattern.MLA
        dense = self.moe.dense_layers if self.moe else self.num_layers
        dense_blocks = (attention + layer_pattern.MLP,) * dense
        return dense_blocks + (attention + layer_pattern.MOE,) * (self.num_layers - dense)

    def is_interleaved(self, stages: int) -> bool:
        """Return whether each pipeline stage has several segments of the pattern."""
        return self.pattern is not None and layer_pattern.is_virtual(self.pattern, stages)

    @property
    def gpt(self) -> Self | None:
        """Return the GPT with these layers; None if its blocks differ, or `|` ends a stage."""
        gpt = self.model_copy(update={"pattern": None})
        return gpt if self.pattern in (None, "".join(gpt.blocks)) else None

    @property
    def head_size(self) -> int:
        """Return the size of a head with grouped queries."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def heads_size(self) -> int:
        """Return the size of all heads, the input of attention's output projection."""
        size = self.mla.v_head_dim if self.mla else self.head_size
        return self.num_attention_heads * size

    @property
    def mlp_matrices(self) -> int:
        """Return the number of weights in an MLP: up, down and, if it has one, the gate."""
        return 3 if self.activation == "swiglu" else 2

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        if not 0 < self.norm_epsilon < 1:
            raise ValueError(f"norm_epsilon = {self.norm_epsilon}; valid: between 0 and 1")
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}; valid: an even number, for rotary pairs")
        if self.moe and not 0 < self.moe.topk <= self.moe.num_experts:
            raise ValueError(
                f"topk = {self.moe.topk}; valid: 1 to num_experts, {self.moe.num_experts}"
            )
        if self.moe and not 0 <= self.moe.dense_layers < self.num_layers:
            raise ValueError(
                f"dense_layers = {self.moe.dense_layers}; valid: fewer than num_layers, "
                f"{self.num_layers}"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _count_blocks(cls, fields: Any) -> Any:
        """Set `num_layers` to the number of blocks in a pattern, if it is not given."""
        if isinstance(fields, dict) and isinstance(pattern := fields.get("pattern"), str):
            return {"num_layers": len(layer_pattern.blocks_of(pattern))} | fields
        return fields

    def check_pattern(self) -> None:
        """Raise PatternError if the pattern is not valid, or does not fit the other sizes."""
        if self.pattern is None:
            if self.mamba is not None:
                raise layer_pattern.PatternError(
                    "The model has sizes of Mamba layers, but no pattern of layers",
                    expected=f"a pattern with {layer_pattern.MAMBA}",
                )
            return
        sizes = {
            layer_pattern.ATTENTION: self.num_query_groups is not None,
            layer_pattern.MLA: self.mla is not None,
            layer_pattern.MOE: self.moe is not None,
            layer_pattern.MAMBA: self.mamba is not None,
        }
        layer_pattern.check(self.pattern, sizes)

    @model_validator(mode="after")
    def _fits_pattern(self) -> Self:
        try:
            self.check_pattern()
        except layer_pattern.PatternError as error:
            raise ValueError(str(error)) from error
        # Not of a GPT, whose number of layers is not checked yet, and may be any.
        if self.pattern is not None and self.num_layers != (count := len(self.blocks)):
            raise ValueError(
                f"num_layers = {self.num_layers}; valid: {count}, the pattern's blocks"
            )
        return self

    @model_validator(mode="after")
    def _one_attention(self) -> Self:
        if (self.num_query_groups is None) == (self.mla is None):
            raise ValueError("either num_query_groups or mla must be given")
        if self.mla and (self.head_dim or self.qkv_bias or self.qk_norm):
            raise ValueError("head_dim, qkv_bias and qk_norm are of grouped queries")
        if self.rope and isinstance(self.rope, Yarn) != (self.mla is not None):
            raise ValueError("rope must be yarn with mla, and Llama 3's scaling without it")
        if self.rotary_base is None and (self.mla or self.rope or not self.mamba):
            raise ValueError("rotary_base must be given, except for models with Mamba layers")
        return self


class Model(Shape, NamedRow):
    """A published model, or the user's own if `published_as` is None.

    `parameters` is the total of the built model. `train_sequence` is the longest training sequence
    of the training configurations, in tokens.
    """

    published_as: str | None
    parameters: int
    train_sequence: int

    def shrunk(self, width: int, depth: int) -> Self:
        """Return the model `width` times narrower and `depth` times shallower.

        Heads become fewer and narrower, together by `width`. Their ratio to query groups or to the
        parts of a latent head stays, and so does the kind of attention. The first blocks stay.

        Raises:
            MqoError: a size cannot be divided.
        """
        if (width, depth) == (1, 1):
            return self
        fewer = self._fewer_heads(width)
        self._check_division(width, depth, fewer)
        blocks = self.blocks[: self.num_layers // depth]
        return self.model_copy(
            update={
                "num_layers": len(blocks),
                "pattern": self.pattern and "".join(blocks),
                "hidden_size": self.hidden_size // width,
                "ffn_hidden_size": _blocks(self.ffn_hidden_size // width),
                "num_attention_heads": self.num_attention_heads // fewer,
                "num_query_groups": self.num_query_groups and self.num_query_groups // fewer,
                "head_dim": self.head_dim and self.head_dim // (width // fewer),
                "mla": self.mla and self.mla.narrowed(width, width // fewer),
                "moe": self.moe and self.moe.narrowed(width),
                "mamba": self.mamba and self.mamba.narrowed(width),
            }
        )

    def _fewer_heads(self, width: int) -> int:
        """Return the factor by which to reduce the heads of a model `width` times narrower."""
        if self.mla is not None:
            # The smallest part of a head shrinks to one block; the rest of `width` reduces heads.
            return width // max(1, min(width, self.mla.qk_pos_emb_head_dim // BLOCK))
        assert self.num_query_groups is not None
        most = math.gcd(width, self.num_query_groups)
        # At least two groups stay.
        sizes = (n for n in range(most, 1, -1) if most % n == 0 and self.num_query_groups >= 2 * n)
        return next(sizes, 1)

    def _check_division(self, width: int, depth: int, fewer: int) -> None:
        """Raise MqoError for the first size that a shrunk model cannot have."""
        narrower = width // fewer
        rotary = self.mla.qk_pos_emb_head_dim if self.mla else self.head_size
        sizes = {
            "hidden_size": (self.hidden_size, width),
            "num_attention_heads": (self.num_attention_heads, fewer),
            # The rotation takes pairs.
            "the size of a head": (rotary, 2 * narrower),
        }
        if self.moe:
            sizes["num_experts"] = (self.moe.num_experts, width)
        if self.mamba:
            sizes["mamba.num_heads"] = (self.mamba.num_heads, width)
        for name, (size, divisor) in sizes.items():
            if size % divisor:
                raise MqoError(
                    f"{self.name} cannot be {width} times narrower: {name} is {size}",
                    expected=f"a multiple of {divisor}",
                    help="--shrink W,D divides width and depth by other numbers",
                )
        kinds = {*"".join(self.blocks)}
        counts = range(1, self.num_layers + 1)
        least = next(n for n in counts if {*"".join(self.blocks[:n])} == kinds)
        if self.num_layers // depth < least:
            raise MqoError(
                f"{self.name} cannot be {depth} times shallower: it has {self.num_layers} layers",
                expected=f"at least {depth * least} layers, to keep one of each kind",
                help=f"--shrink {width},{self.num_layers // least} keeps layers of all kinds",
            )


class Dataset(NamedRow):
    """A corpus; `sample` says whether `mqo` can make a small sample of it."""

    published_as: str
    sample: bool


class Mode(NamedRow):
    """The quant types of linear layers, QK and PV.

    `scripts` says that the mode has scripts; `front_end` that flash_attention_config.py offers it.
    """

    linear: str = NONE
    qk: str = NONE
    pv: str = NONE
    scripts: bool = False
    front_end: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the types of linear layers, QK and PV, which are equal for equal modes."""
        return self.linear, self.qk, self.pv

    def types(
        self, gemms: Gemms = "fprop", attention_gemms: AttentionGemms = "forward"
    ) -> dict[str, str]:
        """Return {site: type}; with attention_gemms "all", also of attention's backward pass.

        A product of the backward pass has the type of the product whose gradients it belongs to.
        """
        types = dict.fromkeys(MODE_SITES, NONE) | {"qk": self.qk, "pv": self.pv}
        types |= dict.fromkeys(LINEAR_SITES[gemms], self.linear)
        backward = formats.ATTENTION_BACKWARD if attention_gemms == "all" else ()
        of_backward = {site: types[formats.SITES[site].backward_of] for site in backward}
        return types | formats.chosen_types(of_backward)


class Family(NamedRow):
    """The modes that quantize `sites`, with {type} in their name for the type; or one mode.

    `scripts` says that the modes of documented types have scripts; `front_end` says that
    flash_attention_config.py offers the modes.
    """

    sites: tuple[str, ...]
    scripts: bool
    front_end: bool = False

    @property
    def types(self) -> tuple[str, ...]:
        """Return the types for which the family has a mode."""
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


class Training(NamedRow):
    """A training configuration. Batches and `samples` are in sequences, `sequence` in tokens.

    `shrink_*` divide the model's width and depth. `save_interval` is in iterations; with 0 a run
    saves only at its end, and only if a folder for checkpoints is given. `keep_last` is the number
    of newest checkpoints to keep, 0 for all. `held_out` is the share of documents for validation.
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
        """Return whether the model is shrunk. Such a run may use the dataset's sample."""
        return self.shrink_width > 1

    @property
    def iterations(self) -> int:
        """Return the number of optimizer steps."""
        return self.samples // self.global_batch


PickedT = TypeVar("PickedT")
RowT = TypeVar("RowT", bound=NamedRow)
# Those with scripts. No run depends on it.
SCRIPT_MODELS = ("llama32-1b", "llama31-8b", "deepseek2_lite")
SCRIPT_TYPES = (NONE, *(name for name, row in formats.FORMATS.items() if row.scripts))


@functools.cache
def models() -> Mapping[str, Model]:
    """Return all models, by name."""
    return _rows(Model, "models.toml")


def script_models() -> dict[str, Model]:
    """Return the models with scripts, by name."""
    return {name: models()[name] for name in SCRIPT_MODELS}


@functools.cache
def datasets() -> Mapping[str, Dataset]:
    """Return all datasets, by name."""
    return _rows(Dataset, "datasets.toml")


@functools.cache
def trainings() -> Mapping[str, Training]:
    """Return all training configurations, by name."""
    return _rows(Training, "training.toml")


def modes() -> Mapping[str, Mode]:
    """Return all modes, by name: each family in modes.toml with each type."""
    return _modes(quant_types())


@functools.cache
def _modes(types: tuple[str, ...]) -> Mapping[str, Mode]:
    """Return the modes while `types` are those that a mode may name."""
    result: dict[str, Mode] = {}
    for family in families():
        for quant_type in family.types:
            sites = dict.fromkeys(family.sites, quant_type)
            scripts = family.scripts and quant_type in SCRIPT_TYPES
            name = family.mode(quant_type)
            shared: dict[str, Any] = {"front_end": family.front_end, **sites}
            result[name] = Mode(name=name, scripts=scripts, **shared)
    return result


@functools.cache
def families() -> tuple[Family, ...]:
    """Return all families of modes."""
    return tuple(Family(**row) for row in _load("modes.toml")["family"])


def script_modes(types: Collection[str] | None = None) -> list[Mode]:
    """Return the modes to write scripts for: the documented modes, or those of `types`."""
    if types is None:
        return [mode for mode in modes().values() if mode.scripts]
    typed = [family for family in families() if family.scripts and family.sites]
    return [modes()[family.mode(name)] for family in typed for name in types]


def patterns(names: Collection[str]) -> list[str]:
    """Return `names`, with T for the type if they include all modes of a family.

    Names of types do not change.
    """
    whole = [f for f in families() if f.sites and {f.mode(t) for t in f.types} <= {*names}]
    if not any(family.name != "{type}" for family in whole):
        return list(names)
    short = {family.mode(name): family.mode("T") for family in whole for name in family.types}
    return list(dict.fromkeys(short.get(name, name) for name in names))


def changed(mode: Mode, linear: str | None = None, attention: str | None = None) -> Mode:
    """Return `mode` with another type of linear layers, or other types of attention.

    `attention` is a type as in FA_X (only QK), 'none', or a name like qk_pv_X. The result has the
    name of the first equal mode, or else a name made of its types. UnknownNameError lists the
    valid names.
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
    """Return the types that a mode may name, without 'none'."""
    return (*formats.FORMATS, *PLUGINS)


def clash(name: str, types: Collection[str]) -> str | None:
    """Return a name that a mode and a type would have if `name` became one of `types`, or None."""
    of_name = {family.mode(name) for family in families()} - {name}
    if name not in quant_types() and name in modes():
        return name
    return min(of_name.intersection(types), default=None)


def types_text() -> str:
    """Return a sentence, without full stop, that lists the types T."""
    return f"T is one of {', '.join(quant_types())}"


def pick(table: Mapping[str, PickedT], kind: str, name: str) -> PickedT:
    """Return the row called `name`; UnknownNameError lists the valid ones."""
    check_choice(kind, name, table)
    return table[name]


def expand_modes(given: str) -> list[str]:
    """Return the modes that match `given`, as in `expand`.

    'all' and globs match only modes with scripts, if any match, so that a sweep does not change
    when a format is added.
    """
    first = {family.mode(name) for family in families() for name in SCRIPT_TYPES}
    return expand("quantization mode", modes(), given, first)


def expand(
    kind: str, table: Mapping[str, object], given: str, first: Collection[str] = ()
) -> list[str]:
    """Return the names of `table` that match `given`, in its order, without duplicates.

    `given` is 'all', or names and globs separated by commas; UnknownNameError lists the valid
    names. A glob that matches names in `first` matches only these.
    """
    names: dict[str, None] = {}
    for pattern in (part.strip() for part in given.split(",")):
        matches = list(table) if pattern == ALL else fnmatch.filter(table, pattern)
        matches = [name for name in matches if name in first] or matches
        if not matches:
            check_choice(kind, pattern, table)
        names |= dict.fromkeys(matches)
    return list(names)


def check_choice(kind: str, name: object, valid: Collection[object]) -> None:
    """Raise UnknownNameError unless `name` is one of `valid`."""
    if name not in valid:
        names = [str(v) for v in valid if v is not None]
        short = patterns(names)
        types = f"{types_text()}; --plugin FILE and --formats FILE add yours"
        raise UnknownNameError(kind, str(name), short, help=types if short != names else "")


def check_dtype(name: str | None) -> Dtype | None:
    """Return a dtype, or None for the default; UnknownNameError if the name is unknown."""
    check_choice("dtype", name, (None, *DTYPES))
    return cast(Dtype | None, name)


def _blocks(size: int) -> int:
    """Return `size` rounded down to whole blocks, at least one."""
    return max(BLOCK, size // BLOCK * BLOCK)


def _load(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


def _rows(kind: type[RowT], file: str) -> dict[str, RowT]:
    return {name: kind(name=name, **row) for name, row in _load(file).items()}
