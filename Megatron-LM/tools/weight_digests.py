"""Write the SHA-256 of every tensor in a checkpoint, to compare checkpoints bit for bit.

    python Megatron-LM/tools/weight_digests.py CHECKPOINT/iter_0000008 DIGESTS

It reads checkpoints of torch_dist. Hashes of the files would not do, since those also contain
offsets and times. Weights and optimizer states are tensors; random states and arguments are not.
It needs no vendored source. A checkpoint that would run code is refused.
"""

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Remove this folder from the path: numba would import its coverage.py as the package.
    sys.path[:1] = [str(ROOT / ".mqo_runtime"), str(ROOT)]

import torch
from mqo.megatron.run.unpickle import CheckpointError, typed_errors
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def main(checkpoint: Path, target: Path) -> None:
    """Write {name of a tensor: [dtype, shape, SHA-256]} of an iteration's folder to `target`."""
    try:
        table = digests(checkpoint)
    except (CheckpointError, OSError) as error:
        sys.exit(str(error))
    target.write_text(json.dumps(table, indent=1), encoding="utf-8")


def digests(folder: Path) -> dict[str, list]:
    """Return {name: [dtype, shape, SHA-256]}; only one tensor at a time is in memory.

    Raises:
        CheckpointError: the index is damaged, or would run code.
    """
    result = {}
    with typed_errors():
        index = FileSystemReader(folder).read_metadata().state_dict_metadata
        for name, about in sorted(index.items()):
            if isinstance(about, TensorStorageMetadata):
                tensor = torch.empty(about.size, dtype=about.properties.dtype)
                load({name: tensor}, storage_reader=FileSystemReader(folder), no_dist=True)
                digest = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data)
                result[name] = [str(tensor.dtype), list(tensor.shape), digest.hexdigest()]
    return result


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
