"""Quantized GEMM operands for Megatron: the formats, their reference, and what the sites call."""

from . import config
from .backend import fake_quantize
from .codes import code_values
from .config import QuantConfig
from .cut_blocks import cut_blocks
from .excludes import unmatched
from .extra_pass import extra_pass
from .finite import FiniteError, check_finite
from .formats import (
    BLOCK_SIZES,
    ELEMENTS,
    FAMILIES,
    FORMATS,
    OVERFLOWS,
    QUANT_TYPES,
    REFERENCE_TYPES,
    ROUNDINGS,
    SCALE_RULES,
    SITES,
    check_type,
)
from .guard import (
    SiteCoverage,
    coverage_faults,
    idle_layers,
    ineffective,
    missing,
    site_coverage,
)
from .layers import (
    LABEL,
    FoundLayer,
    Layer,
    exempt,
    find_layers,
    is_exempt,
    label_layers,
    other_weights,
)
from .measure import Measurement, measure, merge_measurements
from .micro_batches import set_replica
from .operands import UNLABELED, GemmOperands, gemm_operands
from .pack import PackedTensor, pack
from .packed_activations import saved_operands
from .parts import OperandParts
from .progress import set_step
from .record import RECORDER, QuantRecord, Recorder, merge
from .source import site_types
from .spec import Hadamard, OperandSpec, QuantSpec
from .traps import Setup, find_traps, notes, setup_traps
from .weights import cached_bytes, weights_changed

__all__ = [
    "BLOCK_SIZES",
    "ELEMENTS",
    "FAMILIES",
    "FORMATS",
    "LABEL",
    "OVERFLOWS",
    "QUANT_TYPES",
    "RECORDER",
    "REFERENCE_TYPES",
    "ROUNDINGS",
    "SCALE_RULES",
    "SITES",
    "UNLABELED",
    "FiniteError",
    "FoundLayer",
    "GemmOperands",
    "Hadamard",
    "Layer",
    "Measurement",
    "OperandParts",
    "OperandSpec",
    "PackedTensor",
    "QuantConfig",
    "QuantRecord",
    "QuantSpec",
    "Recorder",
    "Setup",
    "SiteCoverage",
    "cached_bytes",
    "check_finite",
    "check_type",
    "code_values",
    "config",
    "coverage_faults",
    "cut_blocks",
    "exempt",
    "extra_pass",
    "fake_quantize",
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
    "saved_operands",
    "set_replica",
    "set_step",
    "setup_traps",
    "site_coverage",
    "site_types",
    "unmatched",
    "weights_changed",
]
