"""Checkpoints, weights and configurations of somebody else, given to the programs that read them:

each uses what it gets or leaves with one paragraph, as it does for other errors of its user.
"""

import json
import os
import shutil
import sys
import tempfile
from copy import copy
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.inference import checkpointing
from megatron.inference.algos import distillation
from megatron.inference.gpt import teacher_config
from megatron.training import global_vars
from mqo.megatron.run import answer
from mqo.megatron.run.checkpoints import CheckpointError
from mqo.megatron.run.errors import InferenceError
from mqo.project import Project
from mqo.quant import config
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from ...mqo.damage import attempt
from ...process_groups import join_alone
from .conftest import VOCABULARY

# Some of torch's readers warn of what is damaged.
pytestmark = pytest.mark.filterwarnings("ignore")
CPU = ["--transformer-impl", "local", "--distributed-backend", "gloo"]
CPU += ["--use-cpu-initialization", "--no-persist-layer-norm", "--no-gradient-accumulation-fusion"]
CPU += ["--no-masked-softmax-fusion", "--no-rope-fusion", "--no-bias-swiglu-fusion"]


def program(name):
    """The path of a program in Megatron-LM/tools."""
    return Project.here().tree / "tools" / f"{name}.py"


def entry(name):
    """The entry of a program in Megatron-LM/tools that users call with words."""
    return answer.loaded(program(name), "main")


def asks(folder, name, function, **request):
    """A command that has a program answer a request, as mqo does."""
    file = Path(tempfile.mkdtemp(dir=folder)) / "request.json"
    file.write_text(json.dumps(request, default=str))
    return answer.main, program(name), function, file, folder / "made.json"


def forget():
    """Have no model parallel groups nor global arguments, as a new process."""
    parallel_state.destroy_model_parallel()
    destroy_rerun_state_machine()
    destroy_num_microbatches_calculator()
    global_vars.unset_global_variables()
    join_alone()  # or each group's threads stay


@pytest.fixture
def run(one_rank, monkeypatch, capsys):
    """A function that calls something as a program of its own: exit code, output, errors."""

    def call(function, *words, errors=()):
        forget()
        path = list(sys.path)
        try:
            with patch.dict(os.environ):
                function(*words)
            return 0, *capsys.readouterr()
        except SystemExit as left:
            if left.code in (0, None):
                return 0, *capsys.readouterr()
            out, err = capsys.readouterr()
            return 2, out, f"{err}{left.code}"
        except errors as error:
            return 2, "", f"{type(error).__name__}: {error}"
        finally:
            sys.path[:] = path

    yield call
    forget()


@pytest.fixture(scope="module")
def saved(make, save, tmp_path_factory):
    """Two checkpoints, the second one with hashes, and the arguments of the last."""
    folder = tmp_path_factory.mktemp("saved")
    places = [
        save(make(*flags), folder / name)
        for name, flags in (("plain", ()), ("sealed", ("--verify-integrity",)))
    ]
    args = copy(global_vars.get_args())
    args.vocab_size = VOCABULARY
    return *places, args


@pytest.fixture
def a_checkpoint(saved, tmp_path):
    """A checkpoint, a tokenizer, a text, and what reads them."""
    return checkpoint(saved[0], tmp_path)


@pytest.fixture
def a_sealed_checkpoint(saved, tmp_path):
    """The same, with hashes beside the files."""
    return checkpoint(saved[1], tmp_path)


def checkpoint(folder, tmp_path):
    place = tmp_path / "sound" / "model"
    shutil.copytree(folder, place)
    words = place / "words"
    words.mkdir()
    table = {"<end>": 0} | {f"w{n}": n for n in range(1, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(words / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (words / "tokenizer_config.json").write_text(json.dumps(config))
    (place / "text.txt").write_text(" ".join(f"w{n}" for n in range(2, 100)))
    model = {"checkpoint": place, "platform": CPU, "ignored": []}
    choice = {"text": place / "text.txt", "tokenizer": words, "tokens": 8}
    drawn = {"temperature": 0.0, "top_k": 0, "top_p": 0.0, "seed": 1, "cache": True}
    drawn |= {"prompts": ["w2 w3"], "tokens": 1, "tokenizer": words}
    return place, [
        asks(tmp_path, "evaluate", "run", **model, choice=choice),
        asks(tmp_path, "generate", "generate", **model, **drawn),
        asks(tmp_path, "convert", "describe", checkpoint=place),
        (entry("weight_digests"), place / "iter_0000001", tmp_path / "made.json"),
    ]


@pytest.fixture
def a_teacher(saved, tmp_path):
    """A teacher's checkpoint and the two files of a distillation."""
    place = tmp_path / "sound" / "teacher"
    shutil.copytree(saved[0], place)
    table = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "ffn_hidden_size": 128}
    table |= {"num_query_groups": 1, "normalization": "RMSNorm", "activation": "swiglu"}
    (place / "model_config.yaml").write_text(json.dumps(table, indent=1))
    how = {"logit_layers": ["output_layer", "output_layer"], "kd_loss_scale": 1.0}
    how |= {"intermediate_layer_pairs": [["decoder.final_layernorm", "decoder.final_layernorm"]]}
    (place / "distill.json").write_text(json.dumps(how))
    return place, [
        (teacher_config.load_teacher_config, place, saved[2]),
        (checkpointing.read_arguments, place),
        (distillation._read, place / "distill.json"),
    ]


@pytest.fixture
def hf_weights(tmp_path):
    """A folder of transformers, and what packs it."""
    place = tmp_path / "sound" / "hf"
    place.mkdir(parents=True)
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    of = transformers.LlamaConfig(**sizes, num_attention_heads=2, dtype="bfloat16")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(of, dtype=torch.bfloat16)
    model.save_pretrained(place, max_shard_size="20KB")
    (tmp_path / "quant.toml").write_text('[asked]\nfprop = "mxfp8"\n')
    (place / "quant.toml").write_text('[asked]\nfprop = "mxfp4"\n[quantizer]\nblock = 16\n')
    made = tmp_path / "made"
    own = {"quant_type": None, "config": place / "quant.toml"}
    packs = [
        asks(
            tmp_path, "pack", "write", source=place, target=made, layout=None, is_hybrid=False, **k
        )
        for k in ({"quant_type": "nvfp4", "config": None}, own)
    ]

    def packed(*words):
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        answer.main(*words)

    one = min(place.glob("model-*.safetensors"))
    stats = asks(
        tmp_path, "tensor_stats", "measure", file=one, tensors=["*norm*"], axis=None, own={}
    )
    return place, [*((packed, *words[1:]) for words in packs), stats]


@pytest.fixture
def packed_weights(tmp_path, run):
    """Weights as `mqo export` packs them, and the reader that lies with them."""
    plain, place = tmp_path / "plain", tmp_path / "sound" / "packed"
    plain.mkdir()
    place.mkdir(parents=True)
    weight = torch.randn(64, 32).bfloat16()
    name = "model.layers.0.self_attn.{}_proj.weight"
    tensors = {name.format(one): weight.clone() for one in "qkvo"}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    sizes = {"hidden_size": 32, "num_attention_heads": 1, "torch_dtype": "bfloat16"}
    (plain / "config.json").write_text(json.dumps(sizes))
    type_and_layout = {"quant_type": "nvfp4", "config": None, "layout": "mqo", "is_hybrid": False}
    assert (
        run(*asks(tmp_path, "pack", "write", source=plain, target=place, **type_and_layout))[0] == 0
    )
    return place, [(entry("dequantize"), place, tmp_path / "made")]


@pytest.fixture
def a_quant_toml(tmp_path):
    """The file of a run's options, and what reads it."""
    place = tmp_path / "sound" / "run"
    place.mkdir(parents=True)
    lines = ["[asked]", 'fprop = "nvfp4"', "[quantizer]", "block = 16", 'rounding = "stochastic"']
    lines += ["[schedule]", 'fprop = "nvfp4 until 0.9, then bf16"', "[layers]", 'exclude = ["a"]']
    lines += ['[operands]\n"fprop.x" = { rounding = "nearest-even" }']
    lines += ['[[rules]]\nlayers = "*.0.*"\nquant_type = "mxfp8"']
    (place / "quant.toml").write_text("\n".join(lines) + "\n")
    return place, [(config.load, place / "quant.toml")]


QUICK = ("hf_weights", "packed_weights", "a_quant_toml")
SLOW = ("a_checkpoint", "a_sealed_checkpoint", "a_teacher")
EACH = {"a_checkpoint": 1, "a_sealed_checkpoint": 1}  # commands for a file; all but there
TYPED = {
    "a_teacher": (InferenceError, CheckpointError),
    "a_quant_toml": (ValueError, OSError),
}


def try_files(kind, request, run, seeds):
    """The exit codes of what reads the files of a kind, one of which is damaged for each seed."""
    place, commands = request.getfixturevalue(kind)

    def call(function, *words):
        return run(function, *words, errors=TYPED.get(kind, ()))

    return attempt(call, place, commands, seeds, each=EACH.get(kind))


@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(k, marks=pytest.mark.slow) for k in SLOW)])
def test_a_damaged_file_is_used_or_refused(kind, request, run):
    codes = {code for code, _ in try_files(kind, request, run, range(8))}
    assert 2 in codes <= {0, 2}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", [*QUICK, *SLOW])
def test_none_of_many_damaged_files_is_a_traceback(kind, request, run):
    assert {0, 2} == {code for code, _ in try_files(kind, request, run, range(500))}
