import types

import mqo.megatron.hooks
import pytest
import torch
from mqo.errors import DriftError

from .conftest import PIN, executed, sites

INITIALIZE = """
def initialize_megatron(allow_no_cuda=False):
    if not allow_no_cuda:
        assert torch.cuda.is_available(), "words"
    return "started"
"""
FUSED = """
def _compile_dependencies():
    fused_kernels.load(args)
    fused_kernels.load(args)
"""
RANDOM = """
def _set_cuda_rng_state(new_state, device=-1):
    queue(new_state)
"""
JIT = """
def disable_jit_fuser():
    calls.append("disabled")


def enable_jit_fuser():
    calls.append("enabled")
"""
DATASETS = '''
def compile_helpers():
    """Words."""
    make()
'''


def cuda(available, devices=0, **more):
    facade = types.SimpleNamespace(
        is_available=lambda: available, device_count=lambda: devices, **more
    )
    return types.SimpleNamespace(cuda=facade)


def run(path, source, version=PIN, **names):
    return executed("cpu_trainer", path, source, version, **names)


@pytest.mark.parametrize(("available", "devices"), [(True, 8), (False, 2)])
def test_the_trainer_starts_where_there_is_a_device_of_any_kind(available, devices):
    scope = run("megatron/training/initialize.py", INITIALIZE, torch=cuda(available, devices))
    assert scope["initialize_megatron"]() == "started"


def test_the_trainer_still_demands_a_device():
    scope = run("megatron/training/initialize.py", INITIALIZE, torch=cuda(False, 0))
    with pytest.raises(AssertionError, match="words"):
        scope["initialize_megatron"]()


@pytest.mark.parametrize(("available", "loaded"), [(True, ["args"] * 2), (False, [])])
def test_older_releases_load_fused_kernels_only_with_cuda(available, loaded):
    calls = []
    older = f"{INITIALIZE}\n\n{FUSED}"
    kernels = types.SimpleNamespace(load=calls.append)
    rest = {"torch": cuda(available), "fused_kernels": kernels, "args": "args"}
    scope = run("megatron/training/initialize.py", older, "0.16.1", **rest)
    scope["_compile_dependencies"]()
    assert calls == loaded


@pytest.mark.parametrize("available", [True, False])
def test_an_rng_state_is_set_at_once_where_no_cuda_will_start(available):
    queued, done = [], []
    scope = run(
        "megatron/core/tensor_parallel/random.py",
        RANDOM,
        queue=queued.append,
        torch=cuda(available, set_rng_state=done.append),
    )
    scope["_set_cuda_rng_state"]("state")
    assert (queued, done) == ((["state"], []) if available else ([], ["state"]))


@pytest.mark.parametrize(("available", "called"), [(True, "enabled"), (False, "disabled")])
def test_nothing_is_compiled_on_a_cpu(available, called):
    scope = run("megatron/core/jit.py", JIT, calls=[], torch=cuda(available))
    scope["enable_jit_fuser"]()
    assert scope["calls"] == [called]


@pytest.mark.parametrize("available", [True, False])
def test_nothing_is_compiled_on_a_cpu_where_the_fuser_is_chosen_at_import(available):
    stand_in = cuda(available)
    stand_in.compile = lambda function: "compiled"
    source = (
        "def plain(function):\n    return function\n\n\nfuser = torch.compile if new else plain\n"
    )
    scope = run("megatron/core/jit.py", source, "0.15.3", torch=stand_in, new=True)
    assert scope["fuser"]("plain") == ("compiled" if available else "plain")


L2_NORM = """
def local_multi_tensor_l2_norm(tensors):
    return [torch.norm(tensor) for tensor in tensors]
"""


def test_the_norm_of_many_elements_is_not_off_on_a_cpu():
    scope = run("megatron/core/utils.py", L2_NORM, torch=torch)
    (found,) = scope["local_multi_tensor_l2_norm"]([torch.full((1 << 22,), 0.1)])
    assert found.item() == pytest.approx(0.1 * 2048, rel=1e-7)


ROPE = """
def get_pos_emb_on_this_cp_rank(cp_rank, cp_size):
    return torch.tensor([cp_rank, (2 * cp_size - cp_rank - 1)], device="cpu", pin_memory=True)
"""


@pytest.mark.parametrize("available", [True, False])
def test_only_for_an_accelerator_memory_is_pinned(available):
    stand_in = cuda(available)
    stand_in.tensor = lambda values, device, pin_memory: (values, pin_memory)
    path = "megatron/core/models/common/embeddings/rope_utils.py"
    scope = run(path, ROPE, torch=stand_in)
    assert scope["get_pos_emb_on_this_cp_rank"](1, 4) == ([1, 6], available)


MOVE = """
def maybe_move_tensor_to_cpu(tensor):
    return tensor.numpy() if tensor.is_cuda else tensor
"""


@pytest.mark.parametrize("available", [True, False])
def test_counts_on_the_cpu_become_arrays_where_that_is_the_device(available):
    path = "megatron/core/transformer/moe/moe_utils.py"
    scope = run(path, MOVE, torch=cuda(available))
    found = scope["maybe_move_tensor_to_cpu"](torch.arange(2))
    assert isinstance(found, torch.Tensor) == available


@pytest.mark.parametrize("found", [True, False])
def test_the_dataset_helper_is_compiled_only_where_it_is_not_there(monkeypatch, found):
    asked, made = [], []

    def find_spec(name):
        asked.append(name)
        return object() if found else None

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    scope = run("megatron/core/datasets/utils.py", DATASETS, make=lambda: made.append(True))
    scope["compile_helpers"]()
    assert asked == ["megatron.core.datasets.helpers_cpp"]
    assert made == ([] if found else [True])
    assert scope["compile_helpers"].__doc__ == "Words."


def test_a_trainer_that_demands_cuda_twice_stops_the_patch():
    source = INITIALIZE + "    torch.cuda.is_available()\n"
    with pytest.raises(DriftError, match=r"torch\.cuda\.is_available.* 2 .* 1"):
        sites("cpu_trainer", "megatron/training/initialize.py", source)


def test_the_hooks_run_before_anything_else_of_a_step_and_of_its_end_and_of_a_validation(module):
    steps = []
    module(
        "mqo.megatron.hooks",
        before_step=lambda *given: steps.append(given),
        after_step=lambda iteration: steps.append(iteration),
        before_validation=lambda *given: steps.append(given),
    )
    source = """\
        import time

        def train_step(forward_step_func, data_iterator, model, optimizer):
            steps.append("step")

        def post_training_step_callbacks(model, iteration):
            steps.append("rest")

        def evaluate_and_print_results(prefix, model, iteration):
            steps.append("validation")
        """
    names = {"steps": steps, "get_args": lambda: "args"}
    scope = executed("run_hooks", "megatron/training/training.py", source, **names)
    scope["train_step"](None, None, "model", "optimizer")
    scope["post_training_step_callbacks"](None, 7)
    scope["evaluate_and_print_results"]("validation set", "model", 7)
    assert steps == [
        *(("model", "args", "optimizer"), "step", 7, "rest"),
        *(("model", "args", 7), "validation"),
    ]


def test_the_checkpoint_hooks_come_before_reading_and_saving(monkeypatch):
    calls = []

    def note(name):
        monkeypatch.setattr(mqo.megatron.hooks, name, lambda *given: calls.append((name, *given)))

    for name in (
        *("note_checkpoint", "checked_arguments", "before_load", "before_save", "to_verify"),
    ):
        note(name)
    source = """
        import argparse

        def check_checkpoint_args(checkpoint_args):
            calls.append("checked")

        def load_args_from_checkpoint(state_dict):
            return state_dict['args']

        def save_checkpoint(iteration, non_persistent_ckpt=False):
            calls.append("saved")

        def load_checkpoint(ddp_model, load_arg="load"):
            calls.append("loaded")

        def _load_global_dist_base_checkpoint(args, checkpoint_name):
            calls.append(args.verify_integrity)
        """
    names = {"calls": calls, "get_args": lambda: "args"}
    scope = executed("run_hooks", "megatron/training/checkpointing.py", source, **names)
    scope["check_checkpoint_args"]("theirs")
    scope["load_args_from_checkpoint"]({"args": "saved"})
    scope["load_checkpoint"]("model")
    scope["save_checkpoint"](7)
    scope["save_checkpoint"](8, non_persistent_ckpt=True)
    scope["_load_global_dist_base_checkpoint"]("args", "there")
    assert calls == [
        ("note_checkpoint", "theirs"),
        "checked",
        ("checked_arguments", "saved"),
        ("before_load", "args", "load", "model"),
        "loaded",
        ("before_save", "args", 7),
        "saved",
        "saved",
        ("to_verify", "args", "there"),
        None,  # what stands for it says nothing
    ]


def test_a_release_without_hashes_of_checkpoints_gets_the_other_calls():
    source = """
        def check_checkpoint_args(checkpoint_args):
            pass

        def load_args_from_checkpoint(state_dict):
            return state_dict['args']

        def save_checkpoint(iteration, non_persistent_ckpt=False):
            pass

        def load_checkpoint(ddp_model, load_arg="load"):
            pass
        """
    path = "megatron/training/checkpointing.py"
    made = sites("run_hooks", path, source, version="0.17.0")
    assert [name in made for name in ("before_load", "before_save", "to_verify")] == [1, 1, 0]
    with pytest.raises(DriftError, match="_load_global_dist_base_checkpoint"):
        sites("run_hooks", path, source, version="0.17.1")
