"""Trained weights as a folder of codes and scales, which other programs load."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

from mqo.display import Say
from mqo.errors import ConvertError
from mqo.launch import convert, hf_tokenizer, model_card
from mqo.launch.evaluation import Place
from mqo.launch.hf_source import check_hf_folder, is_hf_folder
from mqo.matrix.tables import Dtype, check_choice
from mqo.process import temporary_folder
from mqo.program import ask
from mqo.quant import formats
from mqo.untrusted import shown

PROGRAM, READER = "tools/pack.py", "tools/dequantize.py"
OWN = "mqo"


class Reader(NamedTuple):
    """Which programs read a layout, of those that were tried on a CPU, and what loads FOLDER."""

    said: str
    code: str


READERS = {
    "compressed-tensors": Reader(
        "transformers 5.23 with compressed-tensors 0.20 loads it; other readers of that layout, "
        "vLLM among them, were not tried",
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
    ),
    "fp8": Reader(
        "transformers 5.23 loads it, on a CPU dequantized; other readers of DeepSeek-V3's layout, "
        "vLLM among them, were not tried",
        "how = FineGrainedFP8Config(dequantize=True)\n"
        'model = AutoModelForCausalLM.from_pretrained("FOLDER", quantization_config=how)',
    ),
    OWN: Reader(
        f"{Path(READER).name}, which lies in the folder, writes the weights in full, for "
        "transformers",
        f"python FOLDER/{Path(READER).name} FOLDER IN_FULL",
    ),
}
_WEIGHTS = (".safetensors", ".safetensors.index.json")
# What is copied: nothing that may be code.
_TEXTS = (model_card.PAGE, "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md")
_BESIDE = (*hf_tokenizer.FILES, hf_tokenizer.GENERATION, *_TEXTS)


@dataclass(frozen=True)
class Exported:
    """The folder, the layout and its name in config.json, and how many weights have which type.

    `left` counts linear layers that stay as they are. `why` says why the layout is not one that
    more programs read, where that is so. `notes` say what the user should know.
    """

    target: str
    layout: str
    name: str
    types: Mapping[str, int]
    left: int
    why: str | None
    readers: str
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The layout, and its name in config.json where that is another."""
        return self.layout + (f", {self.name}" if self.name != self.layout else "")

    @property
    def counts(self) -> str:
        """How many weight matrices have which type."""
        said = ", ".join(f"{count} weight matrices in {kind}" for kind, count in self.types.items())
        return said + (f"; {self.left} of linear layers as they were" if self.left else "")

    def lines(self) -> list[str]:
        """Return what the terminal shows."""
        why = f" ({self.why})" if self.why else ""
        lines = [self.target, self.counts, f"layout {self.kind}{why}", f"read by: {self.readers}"]
        return lines + [f"note: {note}" for note in self.notes]

    def section(self) -> str:
        """Return what the model card says, in Markdown."""
        code = indent(READERS[self.layout].code, "    ")
        return f"{self.counts}. The layout is {self.kind}; {self.readers}.\n\n{code}"


def export(
    tree: Path,
    source: Path,
    target: Path,
    quant_type: str | None = None,
    layout: str | None = None,
    dtype: Dtype | None = None,
    report: Say = lambda line: None,
    ignored: Collection[str] = (),
) -> Exported:
    """Write the weights of a run, a checkpoint, or a folder of transformers' packed to `target`.

    Without `quant_type` each is rounded as the last step of the run rounded it in fprop. Without
    `layout` it is the first of READERS that holds them. `dtype` is what they are rounded to before
    they are quantized; by default they stay as they are. `ignored` are unknown arguments of the
    checkpoint that the user accepts.

    Raises:
        ConvertError: `source` has no weights that transformers has a form for, or no run that says
            how they were quantized; the layout cannot hold them; `target` exists.
        UnknownNameError: there is no such type or layout.
    """
    check_choice("type to export", quant_type, (None, *formats.FORMATS))
    check_choice("layout", layout, (None, *READERS))
    if target.exists():
        raise ConvertError(f"{target} is there already", expected="a new folder")
    if is_hf_folder(source):
        check_hf_folder(source)
    how = ["--type", quant_type] if quant_type else ["--config", str(_config(source))]
    how += ["--layout", layout] if layout else []
    found = None if is_hf_folder(source) else convert.trained(tree, source, ignored=ignored)
    if found is None and dtype is not None:
        raise ConvertError(
            f"{source} is a folder of transformers', whose dtype stays",
            expected="no --dtype with it",
        )
    if found is None and ignored:
        raise ConvertError(
            f"{source} is a folder of transformers', without arguments of Megatron",
            expected="no --ignore-argument with it",
        )
    with temporary_folder("mqo-export-") as folder:
        plain = source
        if found is not None:
            plain = folder / "in full"
            with convert.staged(plain) as stage:
                convert.write_in_full(tree, found, stage, dtype, report)
        with convert.staged(target) as stage:
            notes = (*(found.notes if found else ()), *_copy_rest(plain, stage))
            facts = ask(tree / PROGRAM, [str(plain), str(stage)], after=how, error=ConvertError)
            readers = READERS[facts["layout"]].said
            made = Exported(str(target), **facts, readers=readers, notes=notes)
            if made.layout == OWN:
                shutil.copyfile(tree / READER, stage / Path(READER).name)
            if found is None:
                model_card.add_packed(stage, made.section())
            else:
                model_card.write(plain, target.name, found.training, made.section(), into=stage)
    return made


def _copy_rest(plain: Path, stage: Path) -> tuple[str, ...]:
    """Copy the tokenizer, settings of generation and texts; return a note on what is left out.

    Raises:
        ConvertError: one of them is a pipe, a device or a link out of the folder.
    """
    hf_tokenizer.copy(plain, stage, _BESIDE)
    known = (*_BESIDE, "config.json")
    names = {path.name for path in plain.iterdir() if not path.name.endswith(_WEIGHTS)}
    left = sorted(map(shown, names.difference(known)))
    return (f"not copied, as no class of transformers needs it: {', '.join(left)}",) if left else ()


def _config(source: Path) -> Path:
    """Return the quant.toml of a model that is exported in its trained types."""
    found = None if is_hf_folder(source) else Place.of(source).quant_config
    if found is None:
        raise ConvertError(
            f"{source} does not say how its weights were quantized",
            expected="a run, or --format TYPE, which rounds them anew",
        )
    return found
