"""Folders of transformers', with weights in full, into folders of packed weights.

A file at a time: memory is that of the largest one, which transformers writes with up to 5 GB.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from mqo.megatron.run.errors import PtqError
from mqo.megatron.run.hf_kind import CONFIG, INDEX, check_folder, read_object
from mqo.quant.config import QuantConfig
from mqo.quant.formats import FORMATS, NONE, SITES
from mqo.quant.packing import pack
from mqo.quant.spec import QuantSpec
from torch import Tensor

from ..export import write_json
from ..hf_folder import StoredTensor, stored_tensors
from .layouts import LAYOUTS, SQUARES, Layout, Specs
from .projections import Projection, projections

_LAYER = re.compile(r"\blayers\.(\d{1,9})\.")
_WHOLE = 4  # elements that fill bytes, in formats of 4 and 6 bits, too
Weights = Mapping[str, StoredTensor]
Found = Iterable[Projection]


def uniform(found: Found, quant_type: str) -> dict[Projection, QuantSpec]:
    """Return a type for the projections of attention and MLP; the LM head stays."""
    spec = SQUARES.get(quant_type) or QuantSpec(quant_type)
    return {one: spec for one in found if not one.is_head}


def as_trained(
    found: Found, config: QuantConfig, model: Mapping[str, Any]
) -> dict[Projection, QuantSpec]:
    """Return how the last step of a training quantized the weights, in fprop.

    `model` is its config.json.

    Raises:
        PtqError: it quantized none, or in a way that packed weights cannot repeat.
    """
    quant_type = config.phases("fprop")[-1].quant_type
    operand, specs = SITES["fprop"].rhs, {}
    for one in found:
        how = config.operand_spec("fprop", operand, one.layer, quant_type)
        if how.spec.quant_type == NONE:
            continue
        if how.hadamard or how.gain != 1.0 or how.spec.rounding == "stochastic":
            raise PtqError(
                f"The run transforms the weight of {one.layer}, or rounds it stochastically",
                "weights that are rounded to nearest as they are",
                "--format TYPE rounds them anew",
            )
        _check_squares(one, how.spec, model)
        specs[one] = how.spec
    if not specs:
        raise PtqError(
            "The run quantized no weight of a linear layer",
            "a run whose fprop has a type",
            "--format TYPE rounds the weights anew",
        )
    return specs


def _check_squares(one: Projection, spec: QuantSpec, model: Mapping[str, Any]) -> None:
    """Raise PtqError where a square of Megatron's weight spans parts that transformers splits."""
    if spec.tile != "square" or len(one.parts) == 1:
        return
    rows = _head_size(model) if one.has_heads else one.shape[0]
    if rows % (spec.block or 1):
        raise PtqError(
            f"Squares of {spec.block} span the parts of {one.layer}, which have {rows} rows",
            f"parts of a multiple of {spec.block} rows",
            "--format TYPE rounds each part on its own",
        )


def _head_size(model: Mapping[str, Any]) -> int:
    try:
        head = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    except (KeyError, TypeError, ZeroDivisionError):
        head = None
    if not isinstance(head, int) or head < 1:
        raise PtqError("config.json does not say how large a head is", "hidden_size and heads")
    return head


def _check_layers(model: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise PtqError if the weights lack a layer that config.json counts, or it does not count."""
    count = model.get("num_hidden_layers")
    found = {int(layer[1]) for layer in map(_LAYER.search, names) if layer}
    if not found or count is None:
        return
    if type(count) is not int or count < 1 or sum(layer < count for layer in found) != count:
        raise PtqError(
            f"config.json says num_hidden_layers = {count!r:.40}, and the weights have "
            f"{len(found)} layers",
            "weights of each layer",
        )


def write(
    source: Path,
    target: Path,
    *,
    quant_type: str | None = None,
    config: QuantConfig | None = None,
    layout: str | None = None,
) -> dict[str, Any]:
    """Write the weights and config.json of `source` into the folder `target`, packed.

    All projections are rounded to `quant_type`, or each as a run with `config` does. Without
    `layout` it is the first that takes them. Returns the layout, what config.json says of it, how
    many weights have which type, and why it is not a layout that more programs read.

    Raises:
        PtqError: there is nothing to pack; the layout cannot store it.
        SavedError: a file is missing, cannot be read, or holds quantized weights.
    """
    check_folder(source)
    facts = read_object(source / CONFIG)
    facts.pop("auto_map", None)  # it names code, which is not copied
    weights = stored_tensors(source)
    _check_layers(facts, weights)
    found = projections({name: one.shape for name, one in weights.items()}).values()
    if config is not None:
        specs = as_trained(found, config, facts)
    else:
        specs = uniform(found, quant_type or NONE)
    _check_shapes(specs)
    name, why = _choose(layout, specs)
    if dtype := LAYOUTS[name].dtype(specs):  # else transformers multiplies two dtypes, and fails
        facts["dtype" if "dtype" in facts else "torch_dtype"] = dtype
    _write_files(weights, specs, LAYOUTS[name], target)
    left = [one.module for one in found if one not in specs]
    head = {"lm_head"} - {one.module for one in specs}  # a tied one has no weight in the files
    facts["quantization_config"] = LAYOUTS[name].configuration(specs, sorted({*left, *head}))
    write_json(target / "config.json", facts)
    types = [spec.quant_type for spec in specs.values()]
    counts = {kind: types.count(kind) for kind in FORMATS if kind in types}
    method = facts["quantization_config"].get("format", name)
    return {"layout": name, "name": method, "types": counts, "left": len(left), "why": why}


def _choose(asked: str | None, specs: Specs) -> tuple[str, str | None]:
    """Return the requested layout, or the first that fits the weights and why earlier ones do not.

    Raises:
        PtqError: the requested layout does not fit them.
    """
    refusals = {name: layout.refusal(specs) for name, layout in LAYOUTS.items()}
    name = asked or next(name for name, why in refusals.items() if why is None)
    if why := refusals[name]:
        raise PtqError(f"The layout {name} cannot hold these weights: {why}", "--layout mqo")
    first, why = next(iter(refusals.items()))
    return name, None if asked or why is None else f"not {first}: {why}"


def _check_shapes(specs: Specs) -> None:
    if not specs:
        raise PtqError("No projection was found", "a model of a kind that `mqo convert` knows")
    for one in specs:
        if len(one.shape) != 2 or one.shape[1] % _WHOLE:
            raise PtqError(
                f"{one.module} has the shape {list(one.shape)}",
                f"two axes, and a multiple of {_WHOLE} columns",
            )


def _write_files(weights: Weights, specs: Specs, layout: Layout, target: Path) -> None:
    from safetensors.torch import save_file

    total = 0
    where: dict[str, str] = {}
    files = sorted({one.path for one in weights.values()})
    for path in files:
        names = [name for name, one in weights.items() if one.path == path]
        tensors = dict(_packed(weights, names, specs, layout))
        place = f"{layout.prefix}{path.name}"
        save_file(tensors, target / place, {"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        where |= dict.fromkeys(tensors, place)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_json(target / f"{layout.prefix}{INDEX}", index)


def _packed(
    weights: Weights, names: Iterable[str], specs: Specs, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that replace those with these names."""
    ours = {f"{one.module}.weight": (one, spec) for one, spec in specs.items()}
    for name in names:
        tensor = weights[name].read(name)
        if name not in ours:
            yield name, tensor
            continue
        one, spec = ours[name]
        amax = _amax(weights, one) if spec.scales_by_tensor else None
        parts = layout.tensors(pack(tensor, spec, -1, amax=amax), amax)
        for suffix, part in parts.items():
            yield f"{one.module}.{suffix}", part.contiguous()


def _amax(weights: Weights, one: Projection) -> Tensor:
    """Return the largest magnitude of a layer of Megatron's, all of whose parts share it."""
    names = [f"{module}.weight" for module in one.parts]
    parts = [weights[name].read(name) for name in names]
    return torch.stack([part.abs().amax().float() for part in parts]).amax()
