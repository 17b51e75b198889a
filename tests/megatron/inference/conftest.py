"""Small students and teachers, in one process that is all of Megatron's groups."""

import importlib.util
import os
import sys

import pytest
from mqo.project import Project

PROJECT = Project.here()
READY = (PROJECT.tree / "megatron/core").exists() and importlib.util.find_spec("modelopt")
collect_ignore_glob = [] if READY else ["test_*.py"]

VOCABULARY, SEQUENCE, BATCH = 128, 32, 2
SIZES = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 2"
GROUPS = "--group-query-attention --num-query-groups 1"
FLAGS = f"""
{SIZES} {GROUPS} --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0
--hidden-dropout 0 --position-embedding-type rope --seq-length {SEQUENCE}
--max-position-embeddings {SEQUENCE} --micro-batch-size {BATCH} --global-batch-size {BATCH}
--train-iters 1 --lr 1e-3 --save-interval 1 --vocab-size {VOCABULARY} --transformer-impl local
--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-rope-fusion --use-cpu-initialization --distributed-backend gloo --no-bias-swiglu-fusion
--no-bias-dropout-fusion --no-save-optim --no-save-rng --ckpt-format torch_dist
""".split()
# Deeper and wider, with other heads.
TEACHER = [
    *("--num-layers", "3", "--hidden-size", "96"),
    *("--ffn-hidden-size", "160", "--num-attention-heads", "3"),
]


def mode(model, *, training):
    """`model`, set to training or evaluation: ModelOpt's returns nothing itself."""
    model.train(training)
    return model


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Without a trace: upstream's choice of an attention is an environment variable."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def one_process(one_rank):
    """Megatron's groups, each of this process alone."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.rerun_state_machine import (
        destroy_rerun_state_machine,
        initialize_rerun_state_machine,
    )

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    initialize_rerun_state_machine()
    yield
    destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()


@pytest.fixture(scope="module")
def arguments(one_process):
    """A function that makes upstream's arguments of `base` and more flags the global ones."""
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.inference.arguments import add_modelopt_args
    from megatron.training import arguments, global_vars

    def forget():
        global_vars.unset_global_variables()
        destroy_num_microbatches_calculator()

    def make(*flags, base=FLAGS):
        forget()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["test", *base, *map(str, flags)])
            args = arguments.parse_args(add_modelopt_args)
            arguments.validate_args(args)
        args.padded_vocab_size = VOCABULARY
        global_vars.set_global_variables(args, build_tokenizer=False)
        return args

    yield make
    forget()


@pytest.fixture(scope="module")
def make(arguments):
    """A function that builds the model of some flags, reproducibly, its teacher with it."""
    import torch
    from megatron.inference.gpt.model_provider import model_provider

    def build(*flags, seed=1, base=FLAGS, **parts):
        arguments(*flags, base=base)
        torch.manual_seed(seed)
        return model_provider(**parts)

    return build


@pytest.fixture(scope="module")
def save(arguments):
    """A function that saves a model as iteration 1 to a folder; its flags are the last ones."""
    from megatron.training import get_args
    from megatron.training.checkpointing import save_checkpoint

    def write(model, folder):
        get_args().save = str(folder)
        save_checkpoint(1, [model], None, None, 0)
        return folder

    return write


@pytest.fixture(scope="module")
def teacher(make, save, tmp_path_factory):
    """A teacher, and the folder of its checkpoint."""
    model = make(*TEACHER, seed=2)
    return model.eval(), save(model, tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def tokens():
    """What a model is called with: tokens, positions, no mask, and labels."""
    import torch

    drawn = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator())
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    return (drawn[:, :-1], positions, None), drawn[:, 1:].contiguous()


@pytest.fixture
def captured():
    """A function that calls a model, and gives what its output layer gave: [s, b, vocabulary]."""

    def call(model, inputs, root=None):
        seen = []
        layer = (root or model).output_layer
        hook = layer.register_forward_hook(lambda *of: seen.append(of[-1][0].detach().clone()))
        model(*inputs[0], labels=inputs[1])
        hook.remove()
        return seen[0]

    return call


@pytest.fixture
def quantized(tmp_path, monkeypatch):
    """A run whose schedule has every forward site quantize, whatever the source says."""
    from mqo.quant import config
    from mqo.quant.record import RECORDER

    sites = "".join(f'{site} = "mxfp4 until 9, then bf16"\n' for site in ("fprop", "qk", "pv"))
    (tmp_path / "quant.toml").write_text(f"[schedule]\n{sites}")
    monkeypatch.setenv(config.ENVIRONMENT_VARIABLE, str(tmp_path / "quant.toml"))
    config.reset()
    RECORDER.reset()
    yield RECORDER
    monkeypatch.undo()
    config.reset()
    RECORDER.reset()
