"""What a run checks before it starts, and the variables that Megatron's validation reads."""

import pytest
from mqo.errors import RunError
from mqo.launch.checks import check_run, validated_variables
from mqo.launch.config import resolve
from mqo.launch.machine import Machine
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.project import Project


@pytest.mark.parametrize(
    ("flags", "connections"),
    [
        ((), "1"),
        (("--tensor-model-parallel-size", "2"), "1"),
        (("--use-torch-fsdp2",), "8"),
        (("--use-megatron-fsdp", "--tensor-model-parallel-size", "2"), "8"),
    ],
)
def test_only_fsdp_has_several_connections(flags, connections):
    assert validated_variables(flags) == {"CUDA_DEVICE_MAX_CONNECTIONS": connections}


@pytest.mark.parametrize("flag", ["--use-torch-fsdp2", "--use-megatron-fsdp"])
def test_fsdp_without_a_gpu_is_refused_by_name(flag):
    project = Project.here()
    config = resolve("llama32-1b", "wikipedia", "mxfp8", "tiny", extra_flags=(flag,))
    tree, series = Tree(project.tree), Series.of_project(project)
    with pytest.raises(RunError, match=f"{flag} trains only on GPUs"):
        check_run(project, tree, series, config, Machine(2, 0), config.quantization.types)
