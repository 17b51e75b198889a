"""Starts the tests of a Triton kernel in the interpreter, and compiles kernels for no device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).parents[3]
POINTERS = {
    torch.int16: "*i16",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
}


def run_in_the_interpreter(file, which):
    """How many of the tests of `file` with the mark pass under TRITON_INTERPRET=1, in a process.

    It has to be chosen before triton is imported.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", which, file],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.search(r"(\d+) passed", done.stdout)[1])


class Recorder:
    """Stands in for a kernel, and keeps what it is launched with."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, num_warps, **named):
        options = {"num_stages", "enable_fp_fusion"} & named.keys()
        self.options = {name: named.pop(name) for name in options} | {"num_warps": num_warps}
        self.arguments = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named


def compile_ahead(monkeypatch, module, launch):
    """What Triton makes of `module._kernel` for an H100, as `launch()` calls it."""
    return compile_all(monkeypatch, module, ["_kernel"], launch)[0]


def compile_all(monkeypatch, module, names, launch):
    """The same of several kernels of a module, each of which `launch()` calls."""
    recorders = [Recorder(getattr(module, name)) for name in names]
    with monkeypatch.context() as patch:
        for name, recorder in zip(names, recorders, strict=True):
            patch.setattr(module, name, recorder)
        launch()
    return [_compiled(recorder) for recorder in recorders]


def _compiled(recorder):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = recorder.kernel
    signature, constants, attributes = {}, {}, {}

    def described(value, place, specialized):
        """The type of an argument as Triton takes it from a call."""
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
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options=recorder.options,
    )
