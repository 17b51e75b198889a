"""Compile Triton kernels without a GPU, and read their machine code.

`compiled(module, names, launch, architecture)` calls `launch()` with the named kernels of the
module replaced by recorders, and compiles each kernel for the recorded arguments. `read` returns
the registers, stack and instructions of a compiled kernel. kernels.py and tests use it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = {"sm_90": 90, "sm_100": 100}
POINTERS = {
    torch.int16: "*i16",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
}
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Code:
    """A kernel's machine code: registers and stack bytes per thread, and its instructions.

    Instructions end with the first exit that all threads take; the slow paths of divisions follow
    it and are not included.
    """

    registers: int
    stack: int
    instructions: tuple[str, ...]

    def count(self, *operations: str) -> int:
        """Count the instructions with one of these opcodes, with any modifiers."""
        return sum(name.split(".")[0] in operations for name in self.instructions)

    @property
    def spills(self) -> int:
        """Count the loads and stores of local memory."""
        return self.count("LDL", "STL")

    @property
    def wide(self) -> bool:
        """Return whether all loads and stores of tensors have 128 bits; amax loads are ignored."""
        moves = [name for name in self.instructions if re.match(r"(LDG|STG)\b", name)]
        return all(name.endswith(".128") for name in moves if name != "LDG.E")


class _Recorder:
    """Replaces a kernel, and records its launch arguments."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: object) -> _Recorder:
        return self

    def __call__(self, *arguments: Any, num_warps: int, **named: Any) -> None:
        options = {"num_stages", "enable_fp_fusion"} & named.keys()
        self.options = {name: named.pop(name) for name in options} | {"num_warps": num_warps}
        self.arguments = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named


def compiled(
    module: ModuleType,
    names: list[str],
    launch: Callable[[], object],
    architecture: str = "sm_90",
) -> list[Any]:
    """Compile the named kernels of a module, each of which `launch()` calls."""
    recorders = [_Recorder(getattr(module, name)) for name in names]
    with ExitStack() as stack:
        for name, recorder in zip(names, recorders, strict=True):
            stack.enter_context(patch.object(module, name, recorder))
        launch()
    target = GPUTarget("cuda", ARCHITECTURES[architecture], 32)
    return [_compiled(recorder, target) for recorder in recorders]


def _compiled(recorder: _Recorder, target: GPUTarget) -> Any:
    kernel = recorder.kernel
    signature, constants, attributes = {}, {}, {}

    def type_of(value: Any, path: tuple, specialized: bool) -> Any:
        """Return the type that Triton infers for an argument; note its attributes."""
        if isinstance(value, tuple):
            parts = enumerate(value)
            return type(value)(*(type_of(part, (*path, i), specialized) for i, part in parts))
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, torch.Tensor) or (specialized and value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype]
        if specialized and value == 1:
            constants[path] = value
            return "constexpr"
        return "i32" if specialized else "i64"  # passed as 64 bits, also if it would fit in 32

    for i, parameter in enumerate(kernel.params):
        value, name = recorder.arguments[parameter.name], parameter.name
        if parameter.is_constexpr or value is None:
            signature[name], constants[(i,)] = "constexpr", value
        else:
            signature[name] = type_of(value, (i,), not parameter.do_not_specialize)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=recorder.options)


def read(kernel: Any) -> Code:
    """Read the machine code of a compiled kernel, with the tools in Triton's wheel."""
    with TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        text, usage = (
            subprocess.run(
                [_TOOLS / "cuobjdump", option, binary], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-sass", "-res-usage")
        )
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text)
    end = next(i for i, line in enumerate(lines) if line.startswith("EXIT"))
    names = (re.sub(r"^@!?U?P\w+\s+", "", line).split()[0] for line in lines[: end + 1])
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    return Code(registers, stack, tuple(names))
