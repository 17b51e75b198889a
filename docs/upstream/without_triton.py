"""megatron.core cannot be imported without Triton, which it does not declare.

Exits with 1 if the bug is there. It needs no GPU.
"""

import sys

sys.modules["triton"] = None  # as if it were not installed
try:
    import megatron.core
except ImportError as error:
    sys.exit(f"megatron.core: {type(error).__name__}: {error}")
print("megatron.core", megatron.core.__version__, "was imported")
