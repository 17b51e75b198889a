"""The program that trains ends at its start where megatron-core comes from a wheel.

Ends with exit code 1 if it does. It needs no GPU.
"""

import sys
from pathlib import Path

from megatron.core.datasets import utils

folder = Path(utils.__file__).parent
print("compiled:", *sorted(path.name for path in folder.glob("helpers_cpp*.so")))
print("Makefile:", (folder / "Makefile").exists())
try:
    utils.compile_helpers()  # initialize_megatron calls it; where it fails it ends the process
except FileNotFoundError as error:
    sys.exit(f"FileNotFoundError: {error}")
print("compile_helpers returned")
