"""Quantised GEMM operands for Megatron: the formats, their reference, and what the sites call."""

from . import config
from .backend import quantise_dequantise
from .config import QuantConfig
from .excludes import unmatched
from .formats import (
    BLOCK_SIZES,
    DEFAULT_ROUNDING,
    E2M1,
    E4M3,
    E5M2,
    HIF8,
    MX_ELEMENTS,
    OVERFLOWS,
    QUANT_TYPES,
    REFERENCE_TYPES,
    ROUNDINGS,
    SCALE_RULES,
    MxElement,
    check_type,
    code_values,
)
from .guard import missing
from .layers import Layer, find_layers, label_layers
from .operands import GemmOperands, gemm_operands
from .pack import PackedTensor, pack
from .record import EXCLUDED, RECORDER, QuantRecord, Recorder, merge
from .sites import SITES, GemmSite
from .spec import QuantSpec
from .stochastic import set_step

__all__ = [
    "BLOCK_SIZES",
    "DEFAULT_ROUNDING",
    "E2M1",
    "E4M3",
    "E5M2",
    "EXCLUDED",
    "HIF8",
    "MX_ELEMENTS",
    "OVERFLOWS",
    "QUANT_TYPES",
    "RECORDER",
    "REFERENCE_TYPES",
    "ROUNDINGS",
    "SCALE_RULES",
    "SITES",
    "GemmOperands",
    "GemmSite",
    "Layer",
    "MxElement",
    "PackedTensor",
    "QuantConfig",
    "QuantRecord",
    "QuantSpec",
    "Recorder",
    "check_type",
    "code_values",
    "config",
    "find_layers",
    "gemm_operands",
    "label_layers",
    "merge",
    "missing",
    "pack",
    "quantise_dequantise",
    "set_step",
    "unmatched",
]
