"""The programs in Megatron-LM/tools as modules."""

import importlib.util
import sys

import pytest
from mqo.project import Project


@pytest.fixture(scope="session")
def load_program():
    """A function that imports a program by its name; what it imports itself is torch's to have."""

    def load(name):
        path = Project.here().tree / "tools" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"{name}_program", path)
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, spec.name, module)  # where dataclasses looks itself up
            spec.loader.exec_module(module)
        return module

    return load
