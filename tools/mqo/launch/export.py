"""Export trained weights as a folder of codes and scales that other programs load."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

from mqo.display import Say
from mqo.errors import ConvertError
from mqo.launch import convert, hf_tokenizer, model_card
from mqo.launch.forward_pass import SavedModel, quant_toml_of
from mqo.launch.hf_source import check_hf_folder, is_hf_folder
from mqo.matrix.tables import Dtype, check_choice
from mqo.process import temporary_folder
from mqo.program import call
from mqo.quant import formats
from mqo.untrusted import shown

PROGRAM, READER = "tools/pack.py", "tools/dequantize.py"
OWN = "mqo"


class Reader(NamedTuple):
    """The programs that read a layout, as tried on a CPU, and code that loads FOLDER."""

    text: str
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
        "config = FineGrainedFP8Config(dequantize=True)\n"
        'model = AutoModelForCausalLM.from_pretrained("FOLDER", quantization_config=config)',
    ),
    OWN: Reader(
        f"{Path(READER).name} in the folder writes the unpacked weights, for transformers",
        f"python FOLDER/{Path(READER).name} FOLDER IN_FULL",
    ),
}
_WEIGHTS = (".safetensors", ".safetensors.index.json")
# Files to copy: none that may be code.
_TEXTS = (model_card.PAGE, "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md")
_BESIDE = (*hf_tokenizer.FILES, hf_tokenizer.GENERATION, *_TEXTS)


@dataclass(frozen=True)
class Exported:
    """The folder, the layout and its name in config.json, and the number of weights per type.

    `left` counts the linear layers that stay unpacked. `why` is the reason if the layout is not one
    that more programs read. `notes` are for the user.
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
        """The layout, and its name in config.json if that differs."""
        return self.layout + (f", {self.name}" if self.name != self.layout else "")

    @property
    def counts(self) -> str:
        """The number of weight matrices of each type, in words."""
        parts = [f"{count} weight matrices in {kind}" for kind, count in self.types.items()]
        left = f"; {self.left} of linear layers unchanged" if self.left else ""
        return ", ".join(parts) + left

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        why = f" ({self.why})" if self.why else ""
        lines = [self.target, self.counts, f"layout {self.kind}{why}", f"read by: {self.readers}"]
        return lines + [f"note: {note}" for note in self.notes]

    def section(self) -> str:
        """Return the section for the model card, in Markdown."""
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
    """Write the weights of a run, a checkpoint or a Hugging Face folder, packed, to `target`.

    Without `quant_type` each weight is rounded as in the fprop of the run's last step. Without
    `layout` the first of READERS that can hold them is used. The weights are cast to `dtype` before
    they are quantized; by default their dtype stays. `ignored` are unknown arguments of the
    checkpoint that the user accepts.

    Raises:
        ConvertError: transformers cannot express the weights of `source`, or no run records how
            they were quantized; the layout cannot hold them; `target` exists.
        UnknownNameError: the type or layout is unknown.
    """
    check_choice("type to export", quant_type, (None, *formats.REFERENCE_TYPES[1:]))
    check_choice("layout", layout, (None, *READERS))
    if target.exists():
        raise ConvertError(f"{target} already exists", expected="a new folder")
    if is_hf_folder(source):
        check_hf_folder(source)
        convert.refuse_mamba(source)
    config = None if quant_type else _config(source)
    checkpoint = None if is_hf_folder(source) else convert.trained(tree, source, ignored=ignored)
    chosen: dict[str, Any] = {"quant_type": quant_type, "config": config, "layout": layout}
    chosen["is_hybrid"] = checkpoint is not None and checkpoint.is_hybrid
    if checkpoint is None and dtype is not None:
        raise ConvertError(
            f"--dtype was given for the Hugging Face folder {source}, whose dtype stays",
            expected="no --dtype",
        )
    if checkpoint is None and ignored:
        raise ConvertError(
            f"--ignore-argument was given for the Hugging Face folder {source}, which has no "
            "arguments of Megatron",
            expected="no --ignore-argument",
        )
    with temporary_folder("mqo-export-") as folder:
        plain = source
        if checkpoint is not None:
            plain = folder / "in full"
            with convert.staged(plain) as stage:
                convert.write_in_full(tree, checkpoint, stage, dtype, report)
        with convert.staged(target) as stage:
            notes = (*(checkpoint.notes if checkpoint else ()), *_copy_rest(plain, stage))
            request = {"source": plain, "target": stage, **chosen}
            facts = call(tree / PROGRAM, "write", request, error=ConvertError)
            readers = READERS[facts["layout"]].text
            exported = Exported(str(target), **facts, readers=readers, notes=notes)
            if exported.layout == OWN:
                shutil.copyfile(tree / READER, stage / Path(READER).name)
            if checkpoint is None:
                model_card.add_packed(stage, exported.section())
            else:
                training, section = checkpoint.training, exported.section()
                model_card.write(plain, target.name, training, section, into=stage)
    return exported


def _copy_rest(plain: Path, stage: Path) -> tuple[str, ...]:
    """Copy the tokenizer, generation settings and texts; return a note on files left out.

    Raises:
        ConvertError: one of them is a pipe, a device or a link out of the folder.
    """
    hf_tokenizer.copy(plain, stage, _BESIDE)
    known = (*_BESIDE, "config.json")
    names = {path.name for path in plain.iterdir() if not path.name.endswith(_WEIGHTS)}
    left = sorted(map(shown, names.difference(known)))
    return (f"not copied, since transformers does not need it: {', '.join(left)}",) if left else ()


def _config(source: Path) -> Path:
    """Return the quant.toml of a model that is exported in the types of its training."""
    config = None if is_hf_folder(source) else SavedModel.find(source).quant_config
    if config is None:
        raise ConvertError(
            f"{source} does not record how its weights were quantized",
            expected="a run, or --format TYPE to round them to that type",
        )
    record = quant_toml_of(config)
    if record.formats:
        raise ConvertError(
            f"{source} was trained with {', '.join(record.formats)} of a user's file, and a reader "
            "of the exported weights knows only the formats of mqo",
            expected="--format TYPE to round the weights to that type",
        )
    if plugins := record.plugins:
        raise ConvertError(
            f"{source} was trained with {', '.join(plugins)} in Python, which have no codes",
            expected="--format TYPE to round the weights to that type",
        )
    return config
