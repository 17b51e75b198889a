"""Trained weights as a folder of codes and scales, which other programs load."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from mqo.display import Say
from mqo.errors import ConvertError
from mqo.launch.convert import megatron_to_hf, staged
from mqo.matrix.tables import Dtype, check_choice
from mqo.process import temporary_folder
from mqo.program import run_program

PROGRAM = "tools/pack.py"
CONFIG = "config.json"
# {type: what compressed-tensors calls its layout}, and the programs that were tried with it.
LAYOUTS = {
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "fp8_block": "float-quantized",
}
READERS = (
    "transformers 5.23 with compressed-tensors 0.20 loads it, in bf16; other readers of that "
    "layout, vLLM among them, were not tried"
)
_WEIGHTS = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True)
class Exported:
    """The folder, the type of its weights, their layout, and which programs load it."""

    target: str
    quant_type: str
    layout: str
    readers: str = READERS

    def lines(self) -> list[str]:
        """Return what the terminal shows."""
        return [self.target, f"{self.quant_type} as {self.layout}: {self.readers}"]


def export(
    tree: Path,
    source: Path,
    target: Path,
    quant_type: str,
    dtype: Dtype | None = None,
    report: Say = lambda line: None,
) -> Exported:
    """Write the weights of a run, a checkpoint, or a folder of transformers' packed to `target`.

    `dtype` is what they are rounded to before they are quantized; by default they stay as they are.

    Raises:
        ConvertError: `source` has no weights that transformers has a form for; the type cannot hold
            them for a known reader; `target` exists.
        UnknownNameError: no such type is exported.
    """
    check_choice("type to export", quant_type, tuple(LAYOUTS))
    if target.exists():
        raise ConvertError(f"{target} is there already", expected="a new folder")
    with temporary_folder("mqo-export-") as folder:
        plain = source if (source / CONFIG).is_file() else folder / target.name
        if plain is not source:
            megatron_to_hf(tree, source, plain, dtype=dtype, report=report)
        elif dtype is not None:
            raise ConvertError(
                f"{source} is a folder of transformers', whose dtype stays",
                expected="no --dtype with it",
            )
        with staged(target) as stage:
            rest = [path for path in plain.iterdir() if not path.name.endswith(_WEIGHTS)]
            for path in (path for path in rest if path.is_file()):
                shutil.copyfile(path, stage / path.name)
            run_program(tree / PROGRAM, [str(plain), str(stage), quant_type], error=ConvertError)
    return Exported(str(target), quant_type, LAYOUTS[quant_type])
