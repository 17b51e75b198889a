"""Packs the weights of a folder that transformers loads: `mqo export` runs it.

    python Megatron-LM/tools/pack.py SOURCE TARGET TYPE

SOURCE has config.json and safetensors; TARGET is there, and gets both. A user-correctable error is
written to the file that MQO_FAILURE names.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(source: str, target: str, quant_type: str) -> None:
    """Pack a folder's weights."""
    # In the place of this folder, whose coverage.py numba would take for the package.
    sys.path[0] = str(ROOT)
    from megatron.inference.errors import PtqError, leave
    from megatron.inference.packed import pack_folder

    try:
        pack_folder(Path(source), Path(target), quant_type)
    except PtqError as error:
        leave(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
