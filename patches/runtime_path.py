"""Make Megatron's packages import mqo from their own tree, if it contains a copy."""

from mqo.overlay.edits import FileEdits, PrependBody
from mqo.overlay.runtime import FOLDER

CODE = f"""
import pathlib as _pathlib
import sys as _sys

_runtime = _pathlib.Path(__file__).resolve().parents[2] / "{FOLDER}"
if _runtime.is_dir() and str(_runtime) not in _sys.path:
    _sys.path.insert(0, str(_runtime))
"""

FILES = tuple(
    FileEdits(f"megatron/{package}/__init__.py", (PrependBody("", CODE),))
    for package in ("core", "training")
)
