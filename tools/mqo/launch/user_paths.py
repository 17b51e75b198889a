"""Make relative paths in the user's flags for Megatron absolute.

The process of a run works in its run folder, where a relative path would name another file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mqo.launch.command import is_number

# Upstream's flags that name files or folders.
_FLAGS = frozenset(
    {
        # data and tokenizers
        *("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"),
        *("--data-args-path", "--per-split-data-args-path", "--per-dataset-sequences-path"),
        *("--data-cache-path", "--object-storage-cache-path", "--vocab-file", "--merge-file"),
        *("--tokenizer-model", "--tokenizer-metadata"),
        # checkpoints
        *("--save", "--load", "--pretrained-checkpoint", "--ckpt-convert-save"),
        *("--non-persistent-global-ckpt-dir", "--non-persistent-local-ckpt-dir"),
        "--export-kd-teacher-load",
        # configurations
        *("--yaml-cfg", "--export-kd-cfg", "--te-precision-config-file"),
        *("--tp-comm-overlap-cfg", "--heterogeneous-layers-config-path"),
        "--nccl-communicator-config-path",
        # output
        *("--tensorboard-dir", "--wandb-save-dir", "--config-logger-dir"),
        *("--memory-snapshot-path", "--flight-recorder-dump-path"),
        *("--result-rejected-tracker-filename", "--moe-routing-trace-path"),
        *("--logits-save-dir", "--logits-load-dir"),
    }
)
# A name on a hub, such as org/model, looks like a relative path.
_ONLY_IF_THERE = frozenset({"--tokenizer-model"})


def absolute_paths(flags: Sequence[str]) -> Iterator[str]:
    """Yield the user's flags for Megatron with absolute paths."""
    flag = ""
    for word in flags:
        if not word.startswith("--"):
            yield _absolute(flag, word)
            continue
        flag, equals, value = word.partition("=")
        yield f"{flag}={_absolute(flag, value)}" if equals else word


def _absolute(flag: str, word: str) -> str:
    """Return one value of a flag; weights of a blend and URLs stay unchanged."""
    if flag not in _FLAGS or not word or is_number(word) or "://" in word:
        return word
    if flag in _ONLY_IF_THERE and not Path(word).exists():
        return word
    return str(Path(word).resolve())
