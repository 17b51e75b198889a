"""If megatron-core comes from a wheel, the training program exits while it starts.

Wheels contain the compiled dataset helper, and no Makefile, but the program tries to compile it.
Exits with 1 if the bug is there. It needs no GPU.
"""

import sys
from pathlib import Path

from megatron.core.datasets import utils

folder = Path(utils.__file__).parent
print("compiled:", *sorted(path.name for path in folder.glob("helpers_cpp*.so")))
print("Makefile:", (folder / "Makefile").exists())
try:
    utils.compile_helpers()  # initialize_megatron calls it; a failure ends the process
except FileNotFoundError as error:
    sys.exit(f"FileNotFoundError: {error}")
print("compile_helpers returned")
