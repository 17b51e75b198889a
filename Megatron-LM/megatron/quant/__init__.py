"""Quantised GEMM operands for Megatron: the formats, their reference, and what the sites call."""

from . import config
from .backend import quantise_dequantise
from .codes import code_values
from .config import QuantConfig
from .excludes import unmatched
from .finite import FiniteError, check_finite
from .formats import (
    BLOCK_SIZES,
    ELEMENTS,
    FORMATS,
    MX_ELEMENTS,
    OVERFLOWS,
    QUANT_TYPES,
    REFERENCE_TYPES,
    ROUNDINGS,
    SCALE_RULES,
    SITES,
    check_type,
)
from .guard import Reach, idle_layers, ineffective, missing, reach, reach_faults
from .layers import (
    FoundLayer,
    Layer,
    exempt,
    find_layers,
    is_exempt,
    label_layers,
    other_weights,
)
from .measure import Measurement, measure, merge_measurements
from .operands import gemm_operands
from .pack import PackedTensor, pack
from .progress import set_step
from .record import RECORDER, QuantRecord, Recorder, merge
from .saved import saved_operands
from .shards import cut_blocks
from .source import site_types
from .spec import QuantSpec
from .traps import Setup, find_traps, notes, setup_traps
from .weights import cached_bytes, weights_changed

__all__ = [
    "BLOCK_SIZES",
    "ELEMENTS",
    "FORMATS",
    "MX_ELEMENTS",
    "OVERFLOWS",
    "QUANT_TYPES",
    "RECORDER",
    "REFERENCE_TYPES",
    "ROUNDINGS",
    "SCALE_RULES",
    "SITES",
    "FiniteError",
    "FoundLayer",
    "Layer",
    "Measurement",
    "PackedTensor",
    "QuantConfig",
    "QuantRecord",
    "QuantSpec",
    "Reach",
    "Recorder",
    "Setup",
    "cached_bytes",
    "check_finite",
    "check_type",
    "code_values",
    "config",
    "cut_blocks",
    "exempt",
    "find_layers",
    "find_traps",
    "gemm_operands",
    "idle_layers",
    "ineffective",
    "is_exempt",
    "label_layers",
    "measure",
    "merge",
    "merge_measurements",
    "missing",
    "notes",
    "other_weights",
    "pack",
    "quantise_dequantise",
    "reach",
    "reach_faults",
    "saved_operands",
    "set_step",
    "setup_traps",
    "site_types",
    "unmatched",
    "weights_changed",
]
