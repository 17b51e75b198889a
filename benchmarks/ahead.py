"""Compiles Triton kernels for a GPU that need not be there, and reads what came out.

`compiled(module, names, launch, architecture)` runs `launch()` with the module's kernels of these
names replaced, and compiles each for what it was launched with. `read` counts what is in the
machine code.
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
    """A kernel's machine code: registers and bytes of stack of a thread, and its instructions.

    Instructions end with the first exit that all threads take: behind it are the rare paths of
    divisions.
    """

    registers: int
    stack: int
    instructions: tuple[str, ...]

    def count(self, *operations: str) -> int:
        """Return how many instructions are such operations, with any modifiers."""
        return sum(name.split(".")[0] in operations for name in self.instructions)

    @property
    def spills(self) -> int:
        """Return loads and stores of local memory."""
        return self.count("LDL", "STL")

    @property
    def wide(self) -> bool:
        """Return whether all loads and stores of tensors have 128 bits, amax values left out."""
        moves = [name for name in self.instructions if re.match(r"(LDG|STG)\b", name)]
        return all(name.endswith(".128") for name in moves if name != "LDG.E")


class _Recorder:
    """Stands in for a kernel, and keeps what it is launched with."""

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
    """Return what Triton makes of a module's kernels, each of which `launch()` calls."""
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

    def described(value: Any, place: tuple, specialized: bool) -> Any:
        """Return the type of an argument as Triton takes it from a call."""
        if isinstance(value, tuple):
            parts = enumerate(value)
            return type(value)(*(described(part, (*place, i), specialized) for i, part in parts))
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, torch.Tensor) or (specialized and value % 16 == 0):
            attributes[place] = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype]
        if specialized and value == 1:
            constants[place] = value
            return "constexpr"
        return "i32" if specialized else "i64"  # a number of 64 bits, whatever it is

    for i, parameter in enumerate(kernel.params):
        value, name = recorder.arguments[parameter.name], parameter.name
        if parameter.is_constexpr or value is None:
            signature[name], constants[(i,)] = "constexpr", value
        else:
            signature[name] = described(value, (i,), not parameter.do_not_specialize)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=recorder.options)


def read(kernel: Any) -> Code:
    """Return the machine code of a compiled kernel, as the tools in Triton's wheel print it."""
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
    registers, stack = (int(re.search(rf"{of}:(\d+)", usage)[1]) for of in ("REG", "STACK"))
    return Code(registers, stack, tuple(names))
