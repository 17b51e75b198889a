"""A cell of the matrix, resolved: everything that decides what a run does, and nothing else."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mqo.errors import MqoError
from mqo.launch.quantiser import Quantiser
from mqo.matrix import tables
from mqo.matrix.tables import Dataset, Dtype, Gemms, Mode, Model, Training


class Cluster(BaseModel):
    """Where a run's processes are: torchrun's own terms."""

    model_config = ConfigDict(frozen=True)
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "localhost"
    master_port: int | None = None
    nproc_per_node: int = 1


class Cell(BaseModel):
    """Model x dataset x mode x training configuration, with what the user changed.

    `types` are the quant types per site that are written into the run's source; None leaves the
    literals of the tree as they are (`--quantization source`). `model` is as it is trained:
    shrunk where the configuration shrinks. `megatron` is a full checkout to run in place of the
    shared tree, by its own pretrain_gpt.py. `schedule` are 'SITE: schedule' texts. `exclude` are
    the layers that stay unquantised, `GLOB` or `SITE:GLOB` each; the run itself checks that each
    one matches. `record_every` is in iterations, None the quantisers' own default, 0 for never;
    `dump` are iterations. `keep_checkpoints` is how many are left of those that the run saves, 0
    for all. `layout` are the planner's flags, `extra_flags` the user's own. `teacher` is a folder
    of checkpoints, or a run that left some, of a model that this one learns from as
    `distillation_config`, a YAML file, says.
    """

    model_config = ConfigDict(frozen=True)
    model: Model
    dataset: Dataset
    mode: str
    types: dict[str, str] | None
    training: Training
    dtype: Dtype
    gemms: Gemms = "fprop"
    cluster: Cluster = Cluster()
    checkpoint: Path | None = None
    tensorboard: Path | None = None
    tokenizer: Path | None = None
    data_prefix: Path | None = None
    megatron: Path | None = None
    layout: tuple[str, ...] = ()
    extra_flags: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    quantiser: Quantiser = Quantiser()
    schedule: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    record_every: int | None = None
    dump: tuple[int, ...] = ()
    keep_checkpoints: int = 0
    check_nan: bool = False
    teacher: Path | None = None
    distillation_config: Path | None = None

    @property
    def title(self) -> str:
        """The cell in a folder name; of several nodes each has a folder."""
        name = f"{self.model.name}_{self.dataset.name}_{self.mode}_{self.training.name}"
        name += "_distilled" if self.teacher else ""
        where = self.cluster
        return f"{name}_node{where.node_rank}" if where.nnodes > 1 else name


SOURCE = "source"


def resolve(
    model: str,
    dataset: str,
    quantization: str,
    training: str,
    *,
    gemms: Gemms = "fprop",
    dtype: Dtype | None = None,
    linear: str | None = None,
    attention: str | None = None,
    exclude: tuple[str, ...] = (),
    keep_checkpoints: int | None = None,
    **rest: object,
) -> Cell:
    """The cell of these names; UnknownNameError lists the valid ones.

    `quantization` is a mode, or "source" for the types that stand in the tree; `linear` and
    `attention` change the mode, as `tables.changed` has it. `keep_checkpoints` None is what the
    training configuration keeps.
    """
    published = tables.pick(tables.models(), "model", model)
    corpus = tables.pick(tables.datasets(), "dataset", dataset)
    config = tables.pick(tables.trainings(), "training configuration", training)
    mode = _mode(quantization, linear, attention)
    for pattern in exclude:
        site, colon, _ = pattern.rpartition(":")
        tables.check_choice("GEMM site", site, (*tables.SITES, *(() if colon else ("",))))
    sequence = min(config.sequence, published.train_sequence)
    return Cell(
        model=published.shrunk(config.shrink_width, config.shrink_depth),
        dataset=corpus,
        mode=mode.name if mode else SOURCE,
        types=mode.types(gemms) if mode else None,
        training=config.model_copy(update={"sequence": sequence}),
        dtype=dtype or config.dtype,
        gemms=gemms,
        exclude=exclude,
        keep_checkpoints=config.keep_last if keep_checkpoints is None else keep_checkpoints,
        **rest,
    )


def _mode(quantization: str, linear: str | None, attention: str | None) -> Mode | None:
    """The mode with its changes; None for the types that stand in the tree."""
    if quantization != SOURCE:
        mode = tables.pick(tables.modes(), "quantization mode", quantization)
        return tables.changed(mode, linear, attention)
    if linear or attention:
        raise MqoError(
            f"With the quantization '{SOURCE}' all types are those in the tree",
            expected="no other type beside it",
            help="script/quant_type_modifier.py changes those in the tree",
        )
    return None
