"""Choose upstream's model class: GPTModel, or HybridModel with a pattern of layers.

When upstream deletes GPTModel, these parts change:

- `chosen_model`: make `hybrid` the default, and refuse `--model-class gpt` for these releases.
- `ProvidedConfig` and `ProvidedBuilder` in megatron/inference/gpt/configured.py: derive them from
  HybridModelConfig and HybridModelBuilder.
- `local_stack` in megatron/inference/gpt/hybrid.py takes its parts out of upstream's local layer of
  a GPT. If gpt_layer_specs.py goes too, build them from LocalSpecProvider in
  megatron/core/models/backends.py.
- `build_gpt` and `_layer_spec` in releases.py, `gpt_config` in configured.py and the patch
  rope_scaling_factor: remove them with the last release that needs them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar, cast, get_args

from mqo.errors import LayoutError
from mqo.launch import engine
from mqo.launch.command import flag_table, without_flag
from mqo.matrix.layer_pattern import FLAG, PatternError, blocks_of
from mqo.matrix.tables import Shape, check_choice

ModelClass = Literal["gpt", "hybrid"]
GPT: ModelClass = "gpt"
HYBRID: ModelClass = "hybrid"
OPTION = "--model-class"
# {flags without effect, or with another one, in a HybridModel of local layers: the reason}
_REFUSED = {
    r"--num-layers(-per-virtual-pipeline-stage)?|--num-virtual-stages-per-pipeline-rank"
    r"|--moe-layer-freq|--pipeline-model-parallel-layout"
    r"|--decoder-(first|last)-pipeline-num-layers"
    r"|--account-for-(embedding|loss)-in-pipeline-split": (
        f"its pattern of layers says the same: {FLAG}, with | between pipeline stages"
    ),
    r"--mtp-.*": "multi-token prediction is not supported in it",
    r"--spec|--heterogeneous-layers-.*|--yaml-cfg|--experimental-attention-variant": (
        "it selects other layers than the pattern"
    ),
    r"--no-rope-freq|--window-attn-skip-freq": "it counts layers, of which a block has several",
    r"--mla-down-proj-fusion|--inference-.*": "it needs layers of Transformer Engine",
}
AnyShape = TypeVar("AnyShape", bound=Shape)


def check_class(name: str | None) -> ModelClass | None:
    """Return a model class, or None for the default; UnknownNameError if the name is unknown."""
    check_choice("model class", name, (None, *get_args(ModelClass)))
    return cast(ModelClass | None, name)


def chosen_model(
    model: AnyShape, model_class: ModelClass | None, flags: Sequence[str]
) -> tuple[AnyShape, str | None, tuple[str, ...]]:
    """Return the model of the chosen class, the pattern in `flags`, and the other flags.

    Args:
        model: the model in the sizes to train.
        model_class: None for the class that the model or the flags imply.
        flags: the user's flags for Megatron.

    Raises:
        PatternError: the pattern is not valid, or does not fit the model, its class or other flags.
        LayoutError: a flag has no effect in a HybridModel.
    """
    given = flag_table(flags)
    pattern = given.get(FLAG)
    if pattern is None and model.pattern is None and model_class != HYBRID:
        return model, None, tuple(flags)
    if model_class == GPT:
        source = f"{FLAG} {pattern}" if pattern else f"the pattern of the model, {model.pattern}"
        raise PatternError(
            f"{OPTION} {GPT} was given, but {source} selects a HybridModel",
            expected=f"no {OPTION}, or {OPTION} {HYBRID}",
        )
    rest = tuple(without_flag(flags, FLAG))
    _check_flags(rest)
    own = model.pattern or "".join(model.blocks)
    return _with_pattern(model, own if pattern is None else pattern), pattern, rest


def _with_pattern(model: AnyShape, pattern: str) -> AnyShape:
    """Return the model with a pattern; PatternError if they do not fit."""
    blocks = len(blocks_of(pattern))
    hybrid = model.model_copy(update={"pattern": pattern, "num_layers": blocks})
    hybrid.check_pattern()
    return hybrid


def _check_flags(flags: Sequence[str]) -> None:
    """Raise LayoutError for the first flag that a HybridModel of local layers does not support."""
    for name in flag_table(flags):
        for pattern, reason in _REFUSED.items():
            if re.fullmatch(pattern, name):
                raise LayoutError(
                    f"{name} was given for a HybridModel: {reason}", expected=f"no {name}"
                )
    if engine.is_asked(flags):
        raise LayoutError(
            f"--transformer-impl {engine.NAME} was given, but HybridModels are trained here only "
            "with local layers",
            expected="local layers, the default",
        )


def check_checkout(model: Shape, megatron: Path | None) -> None:
    """Raise PatternError for a HybridModel in a checkout, whose pretrain_gpt.py builds GPTs."""
    if model.pattern is not None and megatron is not None:
        raise PatternError(
            f"A HybridModel ({FLAG}) cannot be trained with --megatron {megatron}: its "
            "pretrain_gpt.py builds a GPT",
            expected="one of the two",
        )
