"""Imported for its check: every megatron package comes from the folder of this file, and patched.

A megatron-core installed beside, or a `megatron/__init__.py` anywhere on the path, would otherwise
be imported in the place of this tree, without a word, and an unpatched model trained.
"""

import gc
import importlib.util
import sys
import time
from pathlib import Path

PROGRAM_START = time.time()
ROOT = Path(__file__).resolve().parent
OURS = ("megatron.quant", "megatron.device", "megatron.attention", "megatron.losses")
PACKAGES = ("megatron.core", "megatron.training", *OURS)


def check_origin(packages: tuple[str, ...] = PACKAGES) -> None:
    """Leave with an error when a package would be imported from elsewhere."""
    for name in packages:
        try:
            spec = importlib.util.find_spec(name)
        except ImportError:
            spec = None
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin is None or not origin.is_relative_to(ROOT):
            sys.exit(
                f"mqo: {name} would come from {origin or 'nowhere'}. Expected: {ROOT}. Run `mqo "
                "vendor` and `mqo apply` if the tree is incomplete; else remove the other megatron "
                "from PYTHONPATH and site-packages."
            )


def check_patched() -> None:
    """Leave with an error when no patch is applied: upstream's source names no package of ours."""
    layers = ROOT / "megatron/core/tensor_parallel/layers.py"
    source = layers.read_bytes() if layers.exists() else b""
    if b"megatron.device" not in source and b"megatron.quant" not in source:
        sys.exit(
            f"mqo: the Megatron source in {ROOT} is not patched. Expected: a tree with the patch "
            "series applied. Run `mqo apply`."
        )


def disable_gc(module: str) -> None:
    """Disable the garbage collector if `module` is the program, which enables it later.

    Imports make a million objects, and no garbage to look for.
    """
    if module == "__main__":
        gc.disable()


if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
check_patched()
check_origin()
