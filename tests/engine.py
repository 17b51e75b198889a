"""Imports Transformer Engine's real Python code without CUDA, its compiled parts stubbed.

For a process of its own: torch.cuda says afterwards that there is a device, which the engine
insists on; its tensors are the CPU's. What is stubbed, GEMMs and norms, computes as torch does, so
that the engine's own code decides what is quantized, kept, gathered and multiplied. `install` comes
before `megatron.core` is imported.
"""

import enum
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType, SimpleNamespace

import torch
from mqo.megatron import device  # which would hide the engine, had it not been imported

# Kernels in other languages, and exporters, that a training does not need.
_ABSENT = (
    *("onnx", "onnxscript", "einops"),
    "transformer_engine.pytorch.onnx_extensions",
    "transformer_engine.pytorch.triton",
    "transformer_engine.common.triton",
)
_NAMES = {
    "DType": (
        *("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16"),
        *("kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"),
    ),
    "FP8FwdTensors": [f"GEMM{i}_{what}" for i in "123" for what in ("INPUT", "WEIGHT", "OUTPUT")],
    "FP8BwdTensors": [f"{what}{i}" for i in "123" for what in ("GRAD_OUTPUT", "GRAD_INPUT")],
}
_BACKENDS = ["NVTE_No_Backend", "NVTE_F16_arbitrary_seqlen", "NVTE_FP8"]
# Functions that are imported by a star, and so have to be there.
_STARRED = ("layernorm_fwd", "layernorm_bwd", "rmsnorm_bwd_add", "bgrad_quantize", "split_quantize")


def install(folder, version):
    """Import the release of `folder` as `transformer_engine`, and return its PyTorch part."""
    assert not device.HAS_CUDA, "there is a GPU: install Transformer Engine itself"
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # no check of libraries
    package = ModuleType("transformer_engine")
    package.__path__ = [str(folder / "transformer_engine")]
    package.__version__ = version
    package.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None, is_package=True)
    sys.modules["transformer_engine"] = package
    sys.modules["transformer_engine_torch"] = _compiled(tuple(map(int, version.split("."))))
    sys.meta_path.insert(0, _Finder())
    _claim_a_device()
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    return importlib.import_module("transformer_engine.pytorch")


class _Stub:
    """Stands for what is compiled: as a decorator it changes nothing, called it fails."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        raise NotImplementedError(f"{self._name} is compiled, and has no stand-in")

    def __int__(self):
        return 0

    def __or__(self, other):
        return other

    __ror__ = __or__


class _StubModule(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if any(name == absent or name.startswith(f"{absent}.") for absent in _ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StubModule(spec.name)

    def exec_module(self, module):
        pass


def _compiled(version):
    module = _StubModule("transformer_engine_torch")
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    older = ["NVTE_F16_max512_seqlen"] if version < (2, 19) else []
    for name, words in (_NAMES | {"NVTE_Fused_Attn_Backend": _BACKENDS + older}).items():
        setattr(module, name, enum.IntEnum(name, words, start=0))
    for name in _STARRED:
        setattr(module, name, _Stub(name))
    module.generic_gemm, module.te_general_grouped_gemm = gemm, grouped_gemm
    module.rmsnorm_fwd, module.rmsnorm_bwd = rmsnorm_forward, rmsnorm_backward
    module.fused_multi_row_padding = module.fused_multi_row_unpadding = pad_rows
    module.get_cudnn_version = lambda: 91000
    module.get_num_cublas_streams = lambda: 1
    module.swiglu, module.dswiglu = swiglu, swiglu_backward
    return module


# -- what is compiled --------------------------------------------------------------------------

_DTYPES = {2: torch.float32, 3: torch.float16, 4: torch.bfloat16}


def gemm(a, transa, b, transb, out, quantizer, out_dtype, bias, bias_dtype, *rest, **_):
    """BLAS's product, seen from rows: op(b) op(a), added to `out` if asked for."""
    gelu, _, grad, _, _, accumulate, *_ = rest
    assert quantizer is None and not gelu, "the stand-in neither quantizes nor activates"
    assert not any(hasattr(operand, "_quantizer") for operand in (a, b)), "operands are plain"
    rows, other = b.flatten(0, -2), a.flatten(0, -2)
    product = (rows.t() if transb else rows).matmul(other.t() if transa else other)
    of_bias = rows.sum(0) if grad and bias is not None else None
    if bias is not None and not grad:
        product = product + bias
    if out_dtype is not None:
        product = product.to(_DTYPES[int(out_dtype)])
    if out is not None:
        product = out.copy_(out + product if accumulate else product)
    elif not transb:
        product = product.view(*b.shape[:-1], -1)
    return product, of_bias, None, None


def grouped_gemm(a, transa, b, transb, out, out_dtype, splits, bias, bias_dtype, *rest, **_):
    """The same for each group; `out` is one tensor for all, or a list."""
    single, _, grad, _, _, accumulate, *_ = rest
    whole = list(out[0].split(splits)) if single else out
    for i, (left, right) in enumerate(zip(a, b, strict=True)):
        gemm(
            *(left, transa, right, transb, whole[i], None, out_dtype),
            *(bias[i] if bias and bias[i].numel() else None, bias_dtype, False, None, grad),
            *(None, 0, accumulate),
        )
    return bias


def pad_rows(x, out, splits, padded):
    """Each group's rows, with zeros behind them or without."""
    out.zero_()
    for group, place in zip(x.split(splits), out.split(padded), strict=True):
        rows = min(len(group), len(place))
        place[:rows] = group[:rows]


def rmsnorm_forward(x, weight, eps, out, quantizer, dtype, margin, zero_centered):
    assert not zero_centered
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    # In the place of the rows' deviations: all that the backward function is told of the norm.
    told = torch.full((1,), eps, dtype=torch.float64)
    return y if quantizer is None else quantizer(y), None, told


def rmsnorm_backward(grad, x, told, weight, margin, zero_centered):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.enable_grad():
        y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, told.item())
    return torch.autograd.grad(y, (x, weight), grad.view_as(x))


def swiglu(x, quantizer):
    gate, up = x.chunk(2, -1)
    y = torch.nn.functional.silu(gate) * up
    return y if quantizer is None else quantizer(y)


def swiglu_backward(grad, x, quantizer):
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = swiglu(x, None)
    (of_x,) = torch.autograd.grad(y, x, grad)
    return of_x if quantizer is None else quantizer(of_x)


# -- what the engine asks of the machine -------------------------------------------------------


def _claim_a_device():
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=1)
    inert = type("Inert", (device._Inert,), {})
    claimed = {
        "is_available": lambda: True,
        "current_device": lambda: torch.device("cpu"),
        "get_device_properties": lambda of=None: properties,
        "get_device_capability": lambda of=None: (9, 0),
        "device_count": lambda: 1,
        "current_stream": lambda of=None: inert(),
        "synchronize": lambda of=None: None,
        "is_current_stream_capturing": lambda: False,
        **dict.fromkeys(("Stream", "Event", "stream", "device"), inert),
        "nvtx": inert(),
        "_lazy_init": lambda: None,
        "default_generators": dict.fromkeys((0, torch.device("cpu")), torch.default_generator),
    }
    for name, value in claimed.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    for name in ("empty", "zeros", "ones", "tensor", "full"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(make):
    def made(*args, **kwargs):
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


class Norm(torch.autograd.Function):
    """The stand-in for the engine's norm, for layers that have one of their own."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        y, _, told = rmsnorm_forward(x, weight, eps, None, None, None, 0, False)
        ctx.save_for_backward(x, weight, told)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, told = ctx.saved_tensors
        return *rmsnorm_backward(grad.contiguous(), x, told, weight, 0, False), None
