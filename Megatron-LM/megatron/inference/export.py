"""Export quantized models: ModelOpt's unified checkpoint, TensorRT-LLM's, and plain weights.

ModelOpt's exporter walks the model and maps the names. Its tensors of a fused layer are only right
with one scale per layer (FP8): it refuses or drops the scales of SmoothQuant and AWQ, fails with
one scale per row, and writes no configuration for INT8 and INT4. This module writes all of these.

Plain transformers does not read the unified checkpoint: it ignores the scales, and computes with
wrong weights. Dequantized weights are for it.
"""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mqo.megatron.run.errors import PtqError
from mqo.megatron.run.untrusted import read_json_object, read_safetensors_header
from torch import Tensor, nn

SHARD = "5GB"
HYBRID = "megatron.core.models.hybrid"  # imported by ModelOpt's exporter of Hugging Face files
DEQUANTIZED = "dequantized"
# {format: programs that load its unified checkpoint}, from their documentation and ModelOpt's.
# None of them was run here. ModelOpt's documentation names no program for the other formats.
READERS = {
    "fp8": "TensorRT-LLM 0.17, vLLM 0.9.1 and SGLang 0.4.7, and later ones",
    "fp8_pc_pt": "vLLM 0.16, and later ones",
}
# {target: {format: why not}}.
REFUSED = {
    "hf": {"fp8_blockwise": "a block of 128 rows may span projections, which are separate there"},
    "tensorrt_llm": {
        "int8_wo": "ModelOpt writes the scales with other names than TensorRT-LLM reads",
        "fp8_blockwise": "ModelOpt's exporter does not support two-dimensional scales",
    },
}


def advice(name: str) -> str:
    """Return a sentence on the programs that load the unified checkpoint of the format `name`."""
    known = READERS.get(name)
    who = f"{known} load it, as documented (not run here)" if known else "no known program loads it"
    return (
        f"ModelOpt's unified checkpoint of {name}: {who}. Plain transformers ignores the scales "
        "and computes with wrong weights: --dequantized writes a folder for it."
    )


def check(target: str, name: str, decoder: str | None, latent: bool) -> None:
    """Raise PtqError if such a model in the format `name` cannot be exported to `target`.

    `target` is "hf", "tensorrt_llm", or DEQUANTIZED. `latent` says whether its attention is
    multi-latent; `decoder` is the kind that the user expects, if any.
    """
    if why := REFUSED.get(target, {}).get(name):
        raise PtqError(f"{name} cannot be exported to {target}: {why}", expected="another format")
    kind = "deepseek" if latent else "llama"
    if decoder and decoder != kind:
        raise PtqError(
            f"The model is of the kind {kind}, but --decoder is {decoder}",
            expected=f"--decoder {kind}",
        )
    if target in ("hf", DEQUANTIZED) and importlib.util.find_spec(HYBRID) is None:
        raise PtqError(
            f"ModelOpt's exporter needs the package {HYBRID}, and this release has none",
            expected="Megatron 0.18 or newer, or --export-format tensorrt_llm",
        )
    if target == "tensorrt_llm" and latent:
        raise PtqError(
            "ModelOpt's TensorRT-LLM exporter does not support multi-latent attention",
            expected="a model with grouped-query attention",
            help="Use --export-format hf",
        )


# -- Hugging Face ----------------------------------------------------------------------------------


def export_hf(model: nn.Module, folder: Path) -> None:
    """Write safetensors and the quantization's configuration into `folder`, next to config.json.

    A quantized weight `W` [out, in] is stored as integers or FP8 with `weight_scale` (of the
    tensor, [out], or [out, in / block]), for W4A8 also `weight_scale_2`, and for statically
    quantized activations also `input_scale`. INT4 is packed as two rows per byte, the lower half
    first. If there is a `pre_quant_scale` [in], the input is multiplied by it first.
    """
    from huggingface_hub import save_torch_state_dict

    exporter = _exporter(model, folder)
    tensors = _tensors(exporter)
    save_torch_state_dict(tensors, folder, max_shard_size=SHARD)
    _write_configuration(exporter, tensors, folder)


def export_dequantized(model: nn.Module, folder: Path) -> None:
    """Write plain safetensors for transformers into `folder`, next to config.json.

    A quantized weight has the values that the quantized model uses, in the model's dtype; a
    `pre_quant_scale` [in] is multiplied into its columns. Plain weights do not quantize
    activations: a format that does has only half of its effect.
    """
    from huggingface_hub import save_torch_state_dict

    tensors = _tensors(_exporter(model, folder, plain=True))
    save_torch_state_dict(tensors, folder, max_shard_size=SHARD)


def _tensors(exporter: Any) -> dict[str, Tensor]:
    """Return copies: some share memory, which safetensors does not allow."""
    layers = exporter.layer_state_dicts.values()
    return {name: part.clone() for layer in layers for name, part in layer.items()}


def dequantized(module: nn.Module) -> Tensor:
    """Return the weight [out, in] by which a quantized layer multiplies its unscaled input."""
    from modelopt.torch.export.quant_utils import get_prequant_scaling_factor

    layer: Any = module
    with torch.no_grad():
        value = layer.weight_quantizer(layer.weight.detach())
    smooth = get_prequant_scaling_factor(module)
    if smooth is not None:
        value = (value.float() * smooth.float()).to(value.dtype)
    return value


def _write_configuration(exporter: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    import modelopt
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.export.quant_utils import process_layer_quant_config

    quantization = process_layer_quant_config(exporter.layer_config_dict)
    # A tied head is not written, and is not quantized either.
    quantization["exclude_modules"] = sorted({*exporter.exclude_modules, "lm_head"})
    if "pre_quant_scale" in quantization:
        has_scale = any(name.endswith("pre_quant_scale") for name in tensors)
        quantization["pre_quant_scale"] = has_scale
    producer = {"name": "modelopt", "version": modelopt.__version__}
    whole = {"producer": producer, "quantization": quantization}
    write_json(folder / "hf_quant_config.json", whole)
    path = folder / "config.json"
    config = read_json_object(path)
    config["quantization_config"] = convert_hf_quant_config_format(whole)
    write_json(path, config)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _exporter(model: nn.Module, folder: Path, *, plain: bool = False) -> Any:
    """Return ModelOpt's exporter, which has stored the model; `plain` dequantizes the weights."""
    from modelopt.torch.export import quant_utils as scales
    from modelopt.torch.export.unified_export_megatron import GPTModelExporter

    class Exporter(GPTModelExporter):
        """Split a fused layer's weight and its scales into the same rows."""

        def _name_remapping(self, module: Any, prefix: str, **rest: Any) -> None:
            if isinstance(module, Tensor) or scales.get_quantization_format(module) is None:
                super()._name_remapping(module, prefix, **rest)
            else:
                self._store(module, {prefix: torch.arange(module.weight.shape[0])})

        def _gated_mlp_slicing(self, module: Any, prefix: str, **rest: Any) -> None:
            if scales.get_quantization_format(module) is None:
                super()._gated_mlp_slicing(module, prefix, **rest)
                return
            gate, up = torch.arange(module.weight.shape[0]).chunk(2)
            self._store(module, {f"{prefix}gate_proj.": gate, f"{prefix}up_proj.": up})

        def _qkv_slicing(self, module: Any, prefix: str, **rest: Any) -> None:
            if scales.get_quantization_format(module) is None:
                super()._qkv_slicing(module, prefix, **rest)
                return
            rows = qkv_rows(module.config, module.weight.shape[0])
            self._store(module, {f"{prefix}{name}_proj.": part for name, part in rows.items()})

        def _store(self, module: Any, parts: Mapping[str, Tensor]) -> None:
            if plain:
                whole = dequantized(module).to(self.dtype)
                self._state_dict |= {f"{name}weight": whole[rows] for name, rows in parts.items()}
                return
            kind = scales.get_quantization_format(module)
            block = scales.get_weight_block_size(module)
            weight = module.weight.detach().to(self.dtype)
            scale = _shaped(scales.get_weight_scaling_factor(module), weight.shape[0], block)
            second = scales.get_weight_scaling_factor_2(module)
            common = {
                "weight_scale_2": second,
                "input_scale": scales.get_activation_scaling_factor(module),
                "pre_quant_scale": scales.get_prequant_scaling_factor(module),
            }
            for prefix, rows in parts.items():
                own = scale[rows] if scale.dim() else scale
                self._record_layer_quant_config(prefix, kind, block)
                self._state_dict[f"{prefix}weight"] = scales.to_quantized_weight(
                    weight[rows], own, kind, second, block
                )
                self._state_dict[f"{prefix}weight_scale"] = own
                for name, value in common.items():
                    if value is not None:
                        self._state_dict[prefix + name] = value.detach()

    return Exporter(model, str(folder), dtype=next(model.parameters()).dtype)


def _shaped(scale: Tensor, rows: int, block: int) -> Tensor:
    """Return a weight's scale: [rows, blocks] if it has blocks, else [rows] or []."""
    if block:
        return scale.reshape(rows, -1)
    return scale.reshape(rows) if scale.numel() == rows > 1 else scale.reshape(())


def qkv_rows(config: Any, rows: int) -> dict[str, Tensor]:
    """Return the rows of q, k and v in the fused projection, in the order of the heads.

    Each group of heads has its queries, then its key, then its value.
    """
    size, groups = config.kv_channels, config.num_query_groups
    heads = torch.arange(rows).view(groups, -1, size)
    return {
        "q": heads[:, :-2].reshape(-1),
        "k": heads[:, -2].reshape(-1),
        "v": heads[:, -1].reshape(-1),
    }


# -- TensorRT-LLM ----------------------------------------------------------------------------------


def export_tensorrt_llm(
    model: Any, folder: Path, ranks: int, rope: Mapping[str, Any] | None = None
) -> None:
    """Write config.json and rank*.safetensors, one per rank of tensor parallelism.

    `rope` is the rotary scaling in Hugging Face's form. Unquantized weights are in the model's
    dtype, or in fp16 if that is fp32.

    Raises:
        PtqError: the model cannot be split over this number of ranks, or has parts of its own.
    """
    from modelopt.torch.export import export_tensorrt_llm_checkpoint

    for name in ("qk_layernorm", "add_qkv_bias", "num_moe_experts"):
        if getattr(model.config, name, False) and not model.config.multi_latent_attention:
            raise PtqError(
                f"The model has {name}, which is not converted to TensorRT-LLM",
                expected="a model of Llama's kind",
                help="Export it as a Hugging Face folder",
            )
    groups = model.config.num_query_groups
    if groups % ranks and ranks % groups:
        raise PtqError(
            f"{groups} query groups cannot be split over {ranks} ranks",
            expected="an --inference-tensor-parallel that divides them",
        )
    dtype = next(model.parameters()).dtype
    half = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16
    # ModelOpt looks for it in the configuration, where it is not.
    model.config.share_embeddings_and_output_weights = model.share_embeddings_and_output_weights
    try:
        export_tensorrt_llm_checkpoint(
            model, "llama", dtype=half, export_dir=folder, inference_tensor_parallel=ranks
        )
    except (NotImplementedError, ValueError, AssertionError) as error:
        raise PtqError(
            f"ModelOpt cannot export this model to TensorRT-LLM: {error}",
            help="Try a smaller --inference-tensor-parallel",
        ) from error
    _fix_config(folder, rope)


def _fix_config(folder: Path, rope: Mapping[str, Any] | None) -> None:
    """Add the rotary scaling, which ModelOpt omits; correct `pre_quant_scale` for plain INT4."""
    path = folder / "config.json"
    config = read_json_object(path)
    if rope:
        config["rotary_scaling"] = {"type": rope["rope_type"], **rope}
    if "pre_quant_scale" in config["quantization"]:
        names = read_safetensors_header(folder / "rank0.safetensors")
        has_scale = any(name.endswith("prequant_scaling_factor") for name in names)
        config["quantization"]["pre_quant_scale"] = has_scale
    write_json(path, config)
