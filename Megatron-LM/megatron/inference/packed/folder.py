"""Pack the full weights of a transformers folder into another folder.

It reads one file at a time, so it needs the memory of the largest; transformers writes up to 5 GB.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from mqo.megatron.run.errors import PtqError
from mqo.megatron.run.hf_kind import (
    CONFIG,
    INDEX,
    StoredTensor,
    check_folder,
    read_object,
    stored_tensors,
)
from mqo.quant.formats import FORMATS, NONE, SITES
from mqo.quant.packing import pack
from mqo.quant.quant_config import QuantConfig
from mqo.quant.spec import QuantSpec
from torch import Tensor

from ..export import write_json
from .layouts import LAYOUTS, SQUARES, Layout, Specs
from .projections import Projection, projections

_LAYER = re.compile(r"\blayers\.(\d{1,9})\.")
_WHOLE = 4  # this many elements fill whole bytes in all formats, also of 4 and 6 bits
Weights = Mapping[str, StoredTensor]
Projections = Iterable[Projection]


def uniform(candidates: Projections, quant_type: str) -> dict[Projection, QuantSpec]:
    """Return one spec for all projections of attention and MLP; the LM head is left out."""
    spec = SQUARES.get(quant_type) or QuantSpec(quant_type)
    return {projection: spec for projection in candidates if not projection.is_head}


def as_trained(
    candidates: Projections, config: QuantConfig, model: Mapping[str, Any]
) -> dict[Projection, QuantSpec]:
    """Return the specs with which fprop quantized the weights in the last step of a training.

    `model` is its config.json.

    Raises:
        PtqError: it quantized no weight, or in a way that packed weights cannot represent.
    """
    quant_type = config.phases("fprop")[-1].quant_type
    operand, specs = SITES["fprop"].rhs, {}
    for projection in candidates:
        operand_spec = config.operand_spec("fprop", operand, projection.layer, quant_type)
        if operand_spec.spec.quant_type == NONE:
            continue
        if not operand_spec.is_plain or operand_spec.spec.rounding == "stochastic":
            raise PtqError(
                f"The run transforms the weight of {projection.layer}, or rounds it stochastically",
                "untransformed weights, rounded to nearest",
                "Use --format TYPE to round the weights again",
            )
        _check_squares(projection, operand_spec.spec, model)
        specs[projection] = operand_spec.spec
    if not specs:
        raise PtqError(
            "The run quantized no weight of a linear layer",
            "a run that quantizes fprop",
            "Use --format TYPE to round the weights",
        )
    return specs


def _check_squares(projection: Projection, spec: QuantSpec, model: Mapping[str, Any]) -> None:
    """Raise PtqError if a square of Megatron's weight spans parts that transformers separates."""
    if spec.tile != "square" or len(projection.parts) == 1:
        return
    rows = _head_size(model) if projection.has_heads else projection.shape[0]
    if rows % (spec.block or 1):
        raise PtqError(
            f"Squares of {spec.block} span the parts of {projection.layer}, which have {rows} rows",
            f"parts with a multiple of {spec.block} rows",
            "Use --format TYPE to round each part separately",
        )


def _head_size(model: Mapping[str, Any]) -> int:
    try:
        head = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    except (KeyError, TypeError, ZeroDivisionError):
        head = None
    if not isinstance(head, int) or head < 1:
        raise PtqError(
            "config.json does not give the size of a head", "hidden_size and num_attention_heads"
        )
    return head


def _check_layers(model: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise PtqError unless the weights have as many layers as config.json says."""
    count = model.get("num_hidden_layers")
    layers = {int(layer[1]) for layer in map(_LAYER.search, names) if layer}
    if not layers or count is None:
        return
    if type(count) is not int or count < 1 or sum(layer < count for layer in layers) != count:
        raise PtqError(
            f"config.json has num_hidden_layers = {count!r:.40}, but the weights have "
            f"{len(layers)} layers",
            "the weights of each layer",
        )


def write(
    source: Path,
    target: Path,
    *,
    quant_type: str | None = None,
    config: QuantConfig | None = None,
    layout: str | None = None,
    is_hybrid: bool = False,
) -> dict[str, Any]:
    """Write the weights and config.json of `source` into the folder `target`, packed.

    All projections are rounded to `quant_type`, or each as in a run with `config`, whose model
    `is_hybrid` or a GPT. Without `layout`, the first suitable one is used. Return the layout, its
    name in config.json, the number of weights per type, and why it is not a layout that more
    programs read.

    Raises:
        PtqError: there is nothing to pack, or the layout cannot store it.
        SavedError: a file is missing, cannot be read, or has quantized weights.
    """
    check_folder(source)
    facts = read_object(source / CONFIG)
    facts.pop("auto_map", None)  # it names code, which is not copied
    weights = stored_tensors(source)
    _check_layers(facts, weights)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    candidates = projections(shapes, is_hybrid=is_hybrid).values()
    if config is not None:
        specs = as_trained(candidates, config, facts)
    else:
        specs = uniform(candidates, quant_type or NONE)
    _check_shapes(specs)
    name, why = _choose(layout, specs)
    if dtype := LAYOUTS[name].dtype(specs):  # else transformers fails with two dtypes
        facts["dtype" if "dtype" in facts else "torch_dtype"] = dtype
    _write_files(weights, specs, LAYOUTS[name], target)
    left = [projection.module for projection in candidates if projection not in specs]
    head = {"lm_head"} - {spec.module for spec in specs}  # a tied one has no weight in the files
    facts["quantization_config"] = LAYOUTS[name].configuration(specs, sorted({*left, *head}))
    write_json(target / "config.json", facts)
    types = [spec.quant_type for spec in specs.values()]
    counts = {kind: types.count(kind) for kind in FORMATS if kind in types}
    method = facts["quantization_config"].get("format", name)
    return {"layout": name, "name": method, "types": counts, "left": len(left), "why": why}


def _choose(requested: str | None, specs: Specs) -> tuple[str, str | None]:
    """Return the requested layout, or the first suitable one and why the preferred is not.

    Raises:
        PtqError: the requested layout cannot store the weights.
    """
    refusals = {name: layout.refusal(specs) for name, layout in LAYOUTS.items()}
    name = requested or next(name for name, why in refusals.items() if why is None)
    if why := refusals[name]:
        raise PtqError(f"The layout {name} cannot store these weights: {why}", "--layout mqo")
    first, why = next(iter(refusals.items()))
    return name, None if requested or why is None else f"not {first}: {why}"


def _check_shapes(specs: Specs) -> None:
    if not specs:
        raise PtqError("The model has no projection", "a model of a kind that `mqo convert` knows")
    for projection in specs:
        if len(projection.shape) != 2 or projection.shape[1] % _WHOLE:
            raise PtqError(
                f"{projection.module} has the shape {list(projection.shape)}",
                f"two axes, and columns in a multiple of {_WHOLE}",
            )


def _write_files(weights: Weights, specs: Specs, layout: Layout, target: Path) -> None:
    from safetensors.torch import save_file

    total = 0
    where: dict[str, str] = {}
    files = sorted({tensor.path for tensor in weights.values()})
    for path in files:
        names = [name for name, tensor in weights.items() if tensor.path == path]
        tensors = dict(_packed(weights, names, specs, layout))
        file_name = f"{layout.prefix}{path.name}"
        save_file(tensors, target / file_name, {"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        where |= dict.fromkeys(tensors, file_name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_json(target / f"{layout.prefix}{INDEX}", index)


def _packed(
    weights: Weights, names: Iterable[str], specs: Specs, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors to store for those with these names."""
    ours = {f"{projection.module}.weight": (projection, spec) for projection, spec in specs.items()}
    for name in names:
        tensor = weights[name].read(name)
        if name not in ours:
            yield name, tensor
            continue
        projection, spec = ours[name]
        amax = _amax(weights, projection) if spec.scales_by_tensor else None
        parts = layout.tensors(pack(tensor, spec, -1, amax=amax), amax)
        for suffix, part in parts.items():
            yield f"{projection.module}.{suffix}", part.contiguous()


def _amax(weights: Weights, projection: Projection) -> Tensor:
    """Return the amax of a layer in Megatron, which all its parts share."""
    names = [f"{module}.weight" for module in projection.parts]
    parts = [weights[name].read(name) for name in names]
    return torch.stack([part.abs().amax().float() for part in parts]).amax()
