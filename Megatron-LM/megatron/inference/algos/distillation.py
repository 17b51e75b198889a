"""Distillation of Megatron models: the compared layers, their losses, and the balance of these.

It is built on `modelopt.torch.distill`, which runs both models and keeps the outputs of the
compared layers. Shapes: s sequence, b micro-batch, h width, v vocabulary.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import Annotated, Any, Literal

import modelopt.torch.distill as mtd
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from modelopt.torch.distill.loss_balancers import STUDENT_LOSS_KEY
from mqo.megatron.losses import chunked_cross_entropy, chunked_kl
from mqo.megatron.run.errors import DistillationError, reading
from mqo.megatron.run.untrusted import read_yaml
from mqo.quant.labels import exempt
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.nn.modules.loss import _Loss

LM_LOSS, LOGITS_LOSS, INTERMEDIATE_LOSS = "lm loss", "logits loss", "intermediate loss"
# {LM_LOSS, LOGITS_LOSS or INTERMEDIATE_LOSS: a scalar}
LossValues = dict[str, Tensor]
_PROJECTION_STD = 0.01
_LAYER_INDEX = re.compile(r"(?<=\blayers\.)\d+")


# -- the balance -------------------------------------------------------------------------------


class LogitsAndIntermediatesLossBalancer(mtd.DistillationLossBalancer):
    """Combine the student's loss, the logits loss and the intermediate losses into one.

    The mean of the intermediate losses is scaled to the logits loss; then their sum is scaled to
    the student's loss and multiplied by `kd_loss_scale`. The factors are constants for the
    gradient, and 1 if either side is zero or not finite. With `skip_original_loss` the result has
    only the distillation losses, and they are not scaled to the student's.

    The factors are ratios of the losses of this call. If `reference` is set, it gets their detached
    values and returns the values for the ratios, such as means over a whole step.
    """

    def __init__(self, kd_loss_scale: float = 1.0, skip_original_loss: bool = False) -> None:
        super().__init__()
        self.kd_loss_scale = kd_loss_scale
        self.skip_original_loss = skip_original_loss
        # {name: unscaled loss} of the last call, detached.
        self.parts: LossValues = {}
        self.reference: Callable[[LossValues], LossValues] | None = None

    def forward(self, loss_dict: dict[str, Tensor]) -> Tensor:
        """Return the total loss, a scalar.

        Args:
            loss_dict: scalars: `student_loss`, one whose name contains "Logits", and any others;
                not modified.

        Raises:
            DistillationError: there is not exactly one logits loss, or a needed student's loss is
                missing.
        """
        losses = dict(loss_dict)
        student = losses.pop(STUDENT_LOSS_KEY, None)
        names = [name for name in losses if "Logits" in name]
        if len(names) != 1 or (student is None and not self.skip_original_loss):
            raise DistillationError(
                f"The losses are {', '.join(loss_dict) or 'none'}",
                expected=f"{STUDENT_LOSS_KEY}, and one loss with 'Logits' in its name",
            )
        total = logits = losses.pop(names[0])
        others = torch.stack(list(losses.values())).mean() if losses else None
        self.parts = {LOGITS_LOSS: logits.detach()}
        if others is not None:
            self.parts[INTERMEDIATE_LOSS] = others.detach()
        values = self._reference_values(student)
        value = values[LOGITS_LOSS]
        if others is not None:
            factor = _factor(value, values[INTERMEDIATE_LOSS])
            total = logits + others * factor
            value = value + values[INTERMEDIATE_LOSS] * factor
        if self.skip_original_loss or student is None:
            return total
        return student + self.kd_loss_scale * (total * _factor(values[LM_LOSS], value))

    def _reference_values(self, student: Tensor | None) -> LossValues:
        """Return the values from which the factors are computed."""
        values = dict(self.parts)
        if not self.skip_original_loss and student is not None:
            values[LM_LOSS] = student.detach()
        return values if self.reference is None else self.reference(values)


def _factor(goal: Tensor, value: Tensor) -> Tensor:
    """Return the factor that scales `value` to `goal`; 1 if either is zero or not finite."""
    factor = goal / value
    # The values stay on the device: reading them would synchronize with a GPU.
    usable = torch.isfinite(factor) & (factor > 0)
    return torch.where(usable, factor, torch.ones_like(factor))


# -- the losses --------------------------------------------------------------------------------


class _PairLoss(_Loss):
    """A loss between the outputs of two layers, per token, the same on all tensor ranks."""

    def __init__(
        self, model_config: TransformerConfig, projection: nn.Module | None = None
    ) -> None:
        super().__init__()
        self._sequence_parallel = model_config.sequence_parallel
        self._projection = projection or nn.Identity()

    def forward(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return [b, s] in fp32 from the outputs of student and teacher, [s, b, width]."""
        student, teacher = _output(predictions), _output(targets).detach()
        return self.per_token(student, teacher).transpose(0, 1).contiguous()

    def per_token(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return [s, b] in fp32."""
        raise NotImplementedError


class LogitsKLLoss(_PairLoss):
    """KL(teacher || student) in nats, of softmax(logits / temperature); no factor temperature².

    Under tensor parallelism each rank has its part of the vocabulary, and all get the whole sum:
    they exchange maxima and sums, never logits. With `overwrite_targets` the backward pass writes
    the student's gradient over the teacher's logits, which saves a tensor of their size.
    """

    def __init__(
        self,
        model_config: TransformerConfig,
        temperature: float = 1.0,
        overwrite_targets: bool = False,
    ) -> None:
        super().__init__(model_config)
        self._temperature = temperature
        self._overwrite = overwrite_targets
        self._parallel = model_config.tensor_model_parallel_size > 1

    def per_token(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return [s, b] from [s, b, v / ranks]."""
        group = parallel_state.get_tensor_model_parallel_group() if self._parallel else None
        return chunked_kl(student, teacher, self._temperature, group, self._overwrite)


class _HiddenLoss(_PairLoss):
    """A loss of outputs with the full width; the student's is projected to the teacher's."""

    def per_token(self, student: Tensor, teacher: Tensor) -> Tensor:
        loss = self.distance(self._projection(student).float(), teacher.float())
        if not self._sequence_parallel:
            return loss
        # Each rank has a part of the tokens. The following operations are the same on all ranks,
        # so each rank's gradient is its part of the full gradient.
        return gather_from_sequence_parallel_region(loss, tensor_parallel_output_grad=False)

    def distance(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return [s, b] from [s, b, h]."""
        raise NotImplementedError


class HiddenStateCosineLoss(_HiddenLoss):
    """1 - cos(student, teacher)."""

    def distance(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return [s, b] from [s, b, h], in 0 ... 2."""
        return 1 - cosine_similarity(student, teacher, dim=-1)


class HiddenStateMSELoss(_HiddenLoss):
    """The mean over the width of (student - teacher)²."""

    def distance(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return [s, b] from [s, b, h]."""
        return (student - teacher).square().mean(-1)


_CRITERIA = {"cosine": HiddenStateCosineLoss, "mse": HiddenStateMSELoss}


class Projection(nn.Linear):
    """Learned projection from the student's width to the teacher's."""

    def __init__(self, student: TransformerConfig, teacher: TransformerConfig) -> None:
        super().__init__(student.hidden_size, teacher.hidden_size)
        nn.init.normal_(self.weight, std=_PROJECTION_STD)
        nn.init.zeros_(self.bias)
        weight: Any
        for weight in self.parameters():
            # Under sequence parallelism a rank has the gradient of its tokens: upstream sums them.
            weight.sequence_parallel = student.sequence_parallel


def _output(of_layer: Tensor | tuple) -> Tensor:
    """Return a layer's output, without the bias that some of Megatron's layers return."""
    return of_layer[0] if isinstance(of_layer, tuple) else of_layer


# -- the configuration -------------------------------------------------------------------------


_Names = tuple[str, str]
_Scale = Annotated[float, Field(gt=0, strict=True, description="a number above 0")]


class Settings(BaseModel):
    """The keys of a distillation's file; errors print the description as the expected value."""

    model_config = ConfigDict(extra="forbid")
    logit_layers: Annotated[
        _Names, Field(description="a list of two names, [student's, teacher's]")
    ] = ("output_layer", "output_layer")
    intermediate_layer_pairs: Annotated[
        list[_Names | tuple[str, str, Literal["cosine", "mse"]]],
        Field(description="pairs [student's, teacher's] or [student's, teacher's, cosine or mse]"),
    ] = []
    skip_lm_loss: Annotated[bool, Field(strict=True, description="true or false")] = True
    kd_loss_scale: _Scale = 1.0
    temperature: _Scale = 1.0
    balance: Annotated[Literal["step", "micro_batch"], Field(description="step or micro_batch")] = (
        "step"
    )


def load_distillation_config(
    path: str | None, student_cfg: TransformerConfig, teacher_cfg: TransformerConfig
) -> dict[str, Any]:
    """Read the settings of the YAML file at `path`, with defaults; None for only the defaults.

    logit_layers: [student's, teacher's]. intermediate_layer_pairs: a list of [student's, teacher's,
    "cosine" or "mse"], cosine if left out; layers are numbered over the whole model. skip_lm_loss:
    learn only from the teacher. kd_loss_scale: weight relative to the student's loss. temperature:
    of the logits. balance: "step" to average and balance losses over a whole step, or
    "micro_batch". The result also has `criterion`, {(student's layer, teacher's): loss} with the
    layers' names in this pipeline stage, empty in all but the last one; and `loss_balancer`.

    Raises:
        DistillationError: the file is missing or is not such YAML; a key or a value is invalid; the
            last pipeline stage does not hold a layer of a pair.
    """
    settings = _read(path)
    criterion = _criterion(settings, student_cfg, teacher_cfg)
    balancer = LogitsAndIntermediatesLossBalancer(
        settings["kd_loss_scale"], settings["skip_lm_loss"]
    )
    return settings | {"criterion": criterion, "loss_balancer": balancer}


def _read(path: str | None) -> dict[str, Any]:
    fields = Settings.model_fields
    keys = ", ".join(fields)
    content = {} if path is None else read_mapping(Path(path), f"the keys {keys}")
    try:
        return Settings.model_validate(content).model_dump()
    except ValidationError as error:
        unknown = [str(key) for key in content if key not in fields]
        if unknown:
            raise DistillationError(
                f"{path} has the unknown keys {', '.join(unknown)}", expected=f"only keys of {keys}"
            ) from error
        key = str(error.errors()[0]["loc"][0])
        raise DistillationError(
            f"{key} is {content[key]!r}", expected=fields[key].description or ""
        ) from error


def read_mapping(path: Path, expected: str) -> dict[str, Any]:
    """Read a YAML file that holds a mapping; raise DistillationError if it does not."""
    with reading(DistillationError):
        content = read_yaml(path) or {}
    if not isinstance(content, dict):
        raise DistillationError(f"{path} is not a mapping", expected=expected)
    return content


def _criterion(
    settings: Mapping[str, Any], student: TransformerConfig, teacher: TransformerConfig
) -> dict[tuple[str, str], _Loss]:
    # On every rank, so that all of them raise the same error.
    pairs = [
        (_in_last_stage(pair[0], student), _in_last_stage(pair[1], teacher), *pair[2:])
        for pair in settings["intermediate_layer_pairs"]
    ]
    stages = student.pipeline_model_parallel_size
    if stages > 1 and not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return {}
    logits = settings["logit_layers"]
    # Another pair may read the same output of the teacher.
    unshared = logits[1] not in [theirs for _, theirs, *_ in pairs]
    losses: dict[tuple[str, str], _Loss] = {
        logits: LogitsKLLoss(student, settings["temperature"], overwrite_targets=unshared)
    }
    for ours, theirs, *kind in pairs:
        differ = student.hidden_size != teacher.hidden_size
        projection = Projection(student, teacher) if differ else None
        losses[ours, theirs] = _CRITERIA[(kind or ["cosine"])[0]](student, projection)
    return losses


def _in_last_stage(name: str, config: TransformerConfig) -> str:
    """Return a layer's name in the last stage, which computes the losses."""
    stages = config.pipeline_model_parallel_size
    index = _LAYER_INDEX.search(name)
    if stages == 1 or index is None:
        return name
    first = get_transformer_layer_offset(config, pp_rank=stages - 1)
    if int(index[0]) < first:
        raise DistillationError(
            f"{name} is not in the last of {stages} pipeline stages, so no stage holds its pair",
            expected=f"layers {first} to {config.num_layers - 1}",
            help="Use later layers in intermediate_layer_pairs, or fewer stages",
        )
    return _LAYER_INDEX.sub(str(int(index[0]) - first), name, count=1)


def check_layers(
    student: nn.Module, teacher: nn.Module, criterion: Mapping[tuple[str, str], _Loss]
) -> None:
    """Raise DistillationError, with similar names, if a model lacks a compared layer."""
    for pair in criterion:
        for whose, model, name in zip(
            ("student", "teacher"), (student, teacher), pair, strict=True
        ):
            names = [path for path, _ in model.named_modules() if path]
            if name not in names:
                near = difflib.get_close_matches(name, names, n=4, cutoff=0.4) or names[:4]
                raise DistillationError(
                    f"The {whose} has no layer {name}", expected=f"a name such as {', '.join(near)}"
                )


# -- the model ---------------------------------------------------------------------------------


def adjust_distillation_model_for_mcore(
    model: mtd.DistillationModel, distill_cfg: dict[str, Any]
) -> mtd.DistillationModel:
    """Prepare a distillation model for Megatron's training loop; return the changed model.

    The teacher has no gradients, is not quantized, and is not saved. With `skip_lm_loss` the
    student's own loss is only reported, without a gradient. Evaluation computes only that loss,
    without the teacher.
    Pipeline stages send the hidden states of both models together: pass `widened_shapes` to the
    schedule.
    """
    teacher = model.teacher_model
    exempt(teacher.requires_grad_(False).eval())
    # ModelOpt has them in a set, whose order differs between ranks; the order of pairs does not.
    learned = [loss for loss in distill_cfg["criterion"].values() if list(loss.parameters())]
    model._loss_modules = exempt(nn.ModuleList(learned))
    model.balances_steps = distill_cfg["balance"] == "step"
    model.has_factors = not distill_cfg["skip_lm_loss"] or bool(
        distill_cfg["intermediate_layer_pairs"]
    )
    for method in (sharded_state_dict, forward, set_input_tensor):
        setattr(model, method.__name__, MethodType(method, model))
    teacher.compute_language_model_loss = MethodType(_no_lm_loss, teacher)
    if distill_cfg["skip_lm_loss"]:
        model.compute_language_model_loss = MethodType(_detached_lm_loss, model)
    return model


def widened_shapes(model: Any) -> Callable[[list, list], tuple[list, ...]]:
    """Return the schedule's `adjust_tensor_shapes_fn`, which adds the teacher's h to (..., h).

    `model` is a distillation model without wrappers.
    """
    width = model.teacher_model.config.hidden_size

    def widen(received: list[tuple], sent: list[tuple]) -> tuple[list[tuple], ...]:
        both = (received, sent)
        return tuple([(*shape[:-1], shape[-1] + width) for shape in shapes] for shapes in both)

    return widen


# Methods of a distillation model, bound to it above: `type(self)` is ModelOpt's class.


def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the state of the student, with the learned projections."""
    with self.hide_teacher_model():
        return type(self).sharded_state_dict(self, *args, **kwargs)


def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return the student's output; between pipeline stages [s, b, h + the teacher's h]."""
    split = self.config.pipeline_model_parallel_size > 1
    theirs: Any = None
    if self.training or split:
        with torch.no_grad():
            # Setting this model to training also sets its teacher.
            theirs = self.teacher_model.eval()(*args, **kwargs)
    with self.only_student_forward():
        ours = type(self).forward(self, *args, **kwargs)
    return ours if self.post_process or not split else torch.cat([ours, theirs], dim=-1)


def set_input_tensor(self: Any, input_tensor: Tensor | list[Tensor | None]) -> None:
    """Pass each model its part of the tensor from the previous pipeline stage."""
    tensors = input_tensor if isinstance(input_tensor, list) else [input_tensor]
    width = self.config.hidden_size
    ours = [None if tensor is None else tensor[..., :width] for tensor in tensors]
    theirs = [None if tensor is None else tensor[..., width:] for tensor in tensors]
    type(self).set_input_tensor(self, ours)
    self.teacher_model.set_input_tensor(theirs)


def _no_lm_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
    """Return zeros [b, s], for callers that ignore the loss."""
    del self
    return torch.zeros_like(labels, dtype=logits.dtype)


def _detached_lm_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
    """Return the student's loss [b, s] in nats, in training without a gradient.

    Training needs the logits afterwards, and upstream's fused losses overwrite them.
    """
    if not self.training:
        return type(self).compute_language_model_loss(self, labels, logits)
    group = parallel_state.get_tensor_model_parallel_group()
    with torch.no_grad():
        return chunked_cross_entropy(logits, labels.t(), group).t().contiguous()
