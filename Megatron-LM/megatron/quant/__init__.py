"""Quantised GEMM operands for Megatron: the formats, their reference, and what the sites call."""

from . import config
from .config import QuantConfig
from .formats import (
    BLOCK_SIZES,
    E2M1,
    E4M3,
    E5M2,
    HIF8,
    MX_ELEMENTS,
    OVERFLOWS,
    QUANT_TYPES,
    REFERENCE_TYPES,
    SCALE_RULES,
    MxElement,
    check_type,
)
from .guard import missing
from .layers import label_layers
from .operands import GemmOperands, gemm_operands
from .record import RECORDER, QuantRecord, Recorder, merge
from .reference import quantise_dequantise
from .sites import SITES, GemmSite

__all__ = [
    "BLOCK_SIZES",
    "E2M1",
    "E4M3",
    "E5M2",
    "HIF8",
    "MX_ELEMENTS",
    "OVERFLOWS",
    "QUANT_TYPES",
    "RECORDER",
    "REFERENCE_TYPES",
    "SCALE_RULES",
    "SITES",
    "GemmOperands",
    "GemmSite",
    "MxElement",
    "QuantConfig",
    "QuantRecord",
    "Recorder",
    "check_type",
    "config",
    "gemm_operands",
    "label_layers",
    "merge",
    "missing",
    "quantise_dequantise",
]
