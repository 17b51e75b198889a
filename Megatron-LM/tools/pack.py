"""Pack the weights of a folder that transformers loads, for `mqo export`."""

from pathlib import Path
from typing import Any

from megatron.inference.packed import folder
from mqo.megatron.run.errors import InferenceError
from mqo.megatron.run.untrusted import read_text
from mqo.quant.config import parse


def write(
    source: Path,
    target: Path,
    quant_type: str | None,
    config: Path | None,
    layout: str | None,
    is_hybrid: bool,
) -> dict[str, Any]:
    """Write config.json and safetensors of `source`, packed, to `target`, and return a summary.

    All weights get `quant_type`, or what `config`, a quant.toml, says; with `is_hybrid` its names
    are those of a HybridModel.
    """
    try:
        return folder.write(
            source,
            target,
            quant_type=quant_type,
            config=parse(read_text(config)) if config else None,
            layout=layout,
            is_hybrid=is_hybrid,
        )
    except (ValueError, OSError) as error:
        raise InferenceError(str(error)) from error
