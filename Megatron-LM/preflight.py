"""Check on import that every megatron package is patched and comes from the folder of this file.

Otherwise an installed megatron-core, or a `megatron/__init__.py` anywhere on the path, would be
imported silently instead of this tree, and an unpatched model would be trained. If the folder has a
copy of mqo's runtime, like a run's source, the copy is imported.
"""

import gc
import importlib.util
import sys
import time
from pathlib import Path

PROGRAM_START = time.time()
ROOT = Path(__file__).resolve().parent
RUNTIME = ROOT / ".mqo_runtime"
PACKAGES = ("megatron.core", "megatron.training")


def check_origin(packages: tuple[str, ...] = PACKAGES) -> None:
    """Exit with an error if a package would be imported from elsewhere."""
    for name in (*packages, *(("mqo.quant", "mqo.megatron") if RUNTIME.is_dir() else ())):
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
    """Exit with an error if no patch is applied: upstream's source does not import mqo."""
    layers = ROOT / "megatron/core/tensor_parallel/layers.py"
    source = layers.read_bytes() if layers.exists() else b""
    if b"mqo.quant" not in source and b"mqo.megatron" not in source:
        older = " by this version of mqo" if b"custom_quant_type" in source else ""
        sys.exit(
            f"mqo: the Megatron source in {ROOT} is not patched{older}. Expected: a tree with the "
            "patch series applied. Run `mqo apply`."
        )


def check_runtime() -> None:
    """Exit with an error if mqo, which the patched source imports, is missing."""
    if importlib.util.find_spec("mqo") is None:
        sys.exit(
            f"mqo: {sys.executable} has no package mqo. Expected: the package, or a copy of its "
            f"runtime in {RUNTIME}. Run the program with the Python of the virtual environment."
        )


def disable_gc(module: str) -> None:
    """Disable the garbage collector if `module` is the program, which enables it later.

    Imports create a million objects, but no garbage.
    """
    if module == "__main__":
        gc.disable()


for _folder in (ROOT, RUNTIME):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
check_runtime()
check_patched()
check_origin()
