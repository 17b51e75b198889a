"""Check Hugging Face folders as sources of weights, for all commands."""

from __future__ import annotations

import os
from pathlib import Path

from mqo.errors import ConvertError, MqoError
from mqo.megatron.run import hf_kind

CONFIG = "config.json"


def is_hf_folder(path: Path) -> bool:
    """Return whether a folder has a config.json; its reader refuses one that is not a file."""
    return os.path.lexists(path / CONFIG)


def check_hf_folder(path: Path, error: type[MqoError] = ConvertError) -> None:
    """Raise `error` unless a Hugging Face folder holds weights in fp32, bf16 or fp16."""
    try:
        hf_kind.check_folder(path)
    except hf_kind.SavedError as saved_error:
        raise error(**saved_error.facts) from None


def refuse_hf_folder(path: Path, error: type[MqoError]) -> None:
    """Raise `error` for a Hugging Face folder, if a checkpoint of Megatron is needed."""
    if is_hf_folder(path):
        check_hf_folder(path, error)
        raise error(
            f"{path} is a Hugging Face folder",
            expected="a run, or a folder of Megatron's checkpoints",
            help=f"`mqo convert hf-to-megatron {path} CHECKPOINT` converts it",
        )
