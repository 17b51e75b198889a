"""The SHA-256 of every tensor in a checkpoint, for telling whether two hold the same bits.

    python Megatron-LM/tools/weight_digests.py CHECKPOINT/iter_0000008 DIGESTS

Reads what torch_dist wrote, whatever files the tensors lie in: a file's own bytes hold places and
times, too. Weights and the optimizer's states are tensors; random states and arguments are not.
Needs no vendored source. A checkpoint that would run code is refused.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

ROOT = Path(__file__).resolve().parents[1]


def main(checkpoint: Path, target: Path) -> None:
    """Write {name of a tensor: [dtype, shape, SHA-256]} of the folder of an iteration."""
    # In the place of this folder, whose coverage.py numba would take for the package.
    sys.path[:1] = [str(ROOT / ".mqo_runtime"), str(ROOT)]
    from mqo.megatron.run.checkpoints import CheckpointError

    try:
        found = digests(checkpoint)
    except (CheckpointError, OSError) as error:
        sys.exit(str(error))
    target.write_text(json.dumps(found, indent=1), encoding="utf-8")


def digests(folder: Path) -> dict[str, list]:
    """Return {name: [dtype, shape, SHA-256]}; one tensor at a time is in memory.

    Raises:
        CheckpointError: the index is damaged, or would run code.
    """
    from mqo.megatron.run.unpickle import (
        typed_errors,  # and mqo.megatron.run has torch run no foreign code
    )

    found = {}
    with typed_errors():
        index = FileSystemReader(folder).read_metadata().state_dict_metadata
        for name, about in sorted(index.items()):
            if isinstance(about, TensorStorageMetadata):
                tensor = torch.empty(about.size, dtype=about.properties.dtype)
                load({name: tensor}, storage_reader=FileSystemReader(folder), no_dist=True)
                digest = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data)
                found[name] = [str(tensor.dtype), list(tensor.shape), digest.hexdigest()]
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
