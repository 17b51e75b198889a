"""Conversion: what the program checks, on small files; and real conversions.

The models are random ones of each kind; their logits are held to those of transformers.
"""

import functools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from mqo.errors import ConvertError
from mqo.launch import convert
from mqo.launch.flags import platform_flags
from mqo.launch.machine import Machine
from mqo.megatron.run import hf_kind

from ... import forking

torch = pytest.importorskip("torch")
CPU = platform_flags(Machine(1, 0))
VOCABULARY = 131


@pytest.fixture(scope="module")
def program(load_program):
    return load_program("convert")


# -- the checks ------------------------------------------------------------------------------------


def write(folder, name="model.safetensors", **tensors):
    from safetensors.torch import save_file

    save_file(tensors, folder / name)


def test_a_checkpoint_that_would_run_code_is_refused(program, tmp_path, one_rank, monkeypatch):
    class Command:
        def __reduce__(self):
            return os.system, (f"touch '{tmp_path / 'ran'}'",)

    sharded = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    rest = {"common_backend": "torch", "common_backend_version": 1}
    (tmp_path / "metadata.json").write_text(json.dumps(sharded | rest))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Command()))
    from mqo.megatron.run.checkpoints import CheckpointError

    with pytest.raises(CheckpointError, match=r"\.metadata .*\w+\.system"):
        program.describe(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_the_dtype_is_the_tensors_and_of_several_fp32(program, tmp_path):
    one, half = torch.zeros(1), torch.zeros(1).bfloat16()
    for tensors, flags in (
        ({"a": one}, []),
        ({"a": half}, ["--bf16"]),
        ({"a": one, "b": half}, []),
        ({"a": half.half()}, ["--fp16"]),
    ):
        write(tmp_path, **tensors)
        assert program.dtype_flags(hf_kind.stored_tensors(tmp_path)) == flags


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "1 tensors are missing: b"),
        (["a", "b", "c"], "1 tensors are not of this model: c"),
        (["b"], "1 tensors are missing: a"),
    ],
)
def test_another_set_of_tensors_is_refused(program, names, message):
    expected = {"a": torch.zeros(2), "b": torch.zeros(2)}
    found = {name: hf_kind.StoredTensor(Path("f"), (2,), "F32") for name in names}
    with pytest.raises(program.SavedError, match=message) as caught:
        program.check_tensors(expected, found)
    assert caught.value.facts["expected"].startswith("the 2 tensors")


def test_another_shape_is_refused_and_the_same_is_not(program):
    expected = {"a": torch.zeros(2, 3)}
    program.check_tensors(expected, {"a": hf_kind.StoredTensor(Path("f"), (2, 3), "F32")})
    # As many elements: a copy would have gone through.
    with pytest.raises(program.SavedError, match=r"another shape: a \[3, 2\] for \[2, 3\]"):
        program.check_tensors(expected, {"a": hf_kind.StoredTensor(Path("f"), (3, 2), "F32")})


def test_a_tied_head_in_the_file_must_be_the_embedding(program, tmp_path):
    model = torch.nn.Module()
    model.share_embeddings_and_output_weights = True
    head, embedding = program.TIED
    write(tmp_path, **{head: torch.ones(3), embedding: torch.ones(3)})
    assert set(program.without_copies(hf_kind.stored_tensors(tmp_path), model)) == {embedding}
    write(tmp_path, **{head: torch.zeros(3), embedding: torch.ones(3)})
    stored = hf_kind.stored_tensors(tmp_path)
    assert set(program.without_copies(stored, model)) == {head, embedding}


# -- real conversions ------------------------------------------------------------------------------


# {type of transformers: keys of its config.json}. A window that is off has no effect.
WINDOW = {"sliding_window": 4, "max_window_layers": 1, "use_sliding_window": False}
DENSE = {
    "qwen2": WINDOW,
    "qwen3": WINDOW | {"head_dim": 24, "tie_word_embeddings": True},
    "mistral": {"sliding_window": None, "head_dim": 32},
    "qwen3_moe": {
        "head_dim": 24,
        "mlp_only_layers": [0],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
}


def random_model(kind):
    """A transformers model of two or three layers; weights so large that logits are some units."""
    transformers = pytest.importorskip("transformers")
    common = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    if kind == "deepseek2_lite":
        rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0}
        rope |= {"beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707}
        config = transformers.DeepseekV2Config(
            **common,
            num_hidden_layers=3,
            num_key_value_heads=4,
            max_position_embeddings=4096 * 40,
            q_lora_rank=None,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=24,
            first_k_dense_replace=1,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_shared_experts=2,
            moe_intermediate_size=32,
            routed_scaling_factor=1.0,
            rms_norm_eps=1e-6,
            rope_parameters=rope | {"original_max_position_embeddings": 4096},
        )
        return spread(transformers.DeepseekV2ForCausalLM(config))
    if kind == "nemotron_h":
        config = transformers.NemotronHConfig(
            **common,
            hybrid_override_pattern="M-M*-",
            num_key_value_heads=2,
            head_dim=24,
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            ssm_state_size=16,
            time_step_min=1e-30,  # Megatron has no minimum
        )
        return spread(transformers.NemotronHForCausalLM(config))
    if kind in DENSE:
        config = transformers.AutoConfig.for_model(
            kind, **common, **DENSE[kind], num_hidden_layers=2, num_key_value_heads=2
        )
        return spread(transformers.AutoModelForCausalLM.from_config(config))
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        **common,
        num_hidden_layers=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=kind == "llama32-1b",
        rope_parameters=rope | {"factor": 32.0 if kind == "llama32-1b" else 8.0},
    )
    return spread(transformers.LlamaForCausalLM(config))


def spread(model):
    """Norms that are not all one and biases that are not zero, so that each has an effect."""
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model


def tensors(folder):
    from safetensors.torch import load_file

    return {
        k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()
    }


def differing(folder, other):
    """Names of the tensors that differ between two folders, dtype included."""
    first, second = tensors(folder), tensors(other)
    assert first
    return [
        name
        for name in first.keys() | second.keys()
        if name not in first
        or name not in second
        or first[name].dtype != second[name].dtype
        or not torch.equal(first[name], second[name])
    ]


def write_tokenizer(folder):
    """A tokenizer of as many words as the models have tokens; the last but one is the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{i}" for i in range(VOCABULARY - 2)] + ["<end>", "<pad>"]
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<pad>"}))
    return folder


def logits(tree, hf, checkpoint, *flags):
    """What convert_logits.py finds."""
    result = checkpoint.with_suffix(".json")
    script = Path(__file__).with_name("convert_logits.py")
    command = [sys.executable, "-W", "ignore", script, tree, hf, checkpoint, result, *flags, *CPU]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = forking.run(command, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(result.read_text())


KINDS = ("llama32-1b", "llama31-8b", "deepseek2_lite", "nemotron_h", *DENSE)


# Of the first, which ties its embedding, the default suite converts a bf16 model there and back;
# Mistral's is Llama's with the head size of Qwen3's.
OTHERS = ("llama32-1b", "mistral")
every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.heavy if k in OTHERS else ()) for k in KINDS]
)


@pytest.fixture(scope="module")
def converted(vendored, tmp_path_factory):
    """A function of a kind: folder, checkpoint, folder again by way of a training, logits."""

    @functools.cache
    def there_and_back(kind):
        place = tmp_path_factory.mktemp(kind)
        random_model(kind).save_pretrained(place / "hf")
        hf, checkpoint, back = place / "hf", place / "checkpoint", place / "back"
        made = convert.hf_to_megatron(vendored.root, hf, checkpoint)
        # As a training would load and save it: rows of padding behind the tokenizer's.
        padded = [*made.flags, "--vocab-size", str(VOCABULARY), "--save", place / "padded"]
        padded += ["--tokenizer-type", "HuggingFaceTokenizer"]
        padded += ["--tokenizer-model", write_tokenizer(place / "tokenizer")]
        facts = logits(vendored.root, hf, checkpoint, *map(str, padded))
        convert.megatron_to_hf(vendored.root, place / "padded", back)
        return hf, checkpoint, back, facts

    return there_and_back


@every_kind
@pytest.mark.slow
def test_the_logits_are_those_of_transformers(converted, kind):
    facts = converted(kind)[3]
    assert facts["largest"] > 1
    assert facts["difference"] < 1e-4
    assert facts["rows"] == 256


@every_kind
@pytest.mark.slow
def test_there_and_back_is_the_same_to_the_bit(converted, kind):
    """Without the rows of padding that a training has."""
    hf, _, back, _ = converted(kind)
    assert differing(hf, back) == []


@every_kind
@pytest.mark.slow
def test_plain_transformers_takes_what_a_training_made(converted, kind, monkeypatch):
    """With the training's tokenizer, and its end of a document."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        PreTrainedTokenizerFast,
        pipeline,
    )

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hf, _, published, _ = converted(kind)
    # Qwen2's own class would split words, which a note says.
    reader = PreTrainedTokenizerFast if kind == "qwen2" else AutoTokenizer
    tokenizer = reader.from_pretrained(published)
    ids = (VOCABULARY - 2, VOCABULARY - 1)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == ids
    eager = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(published, **eager).eval()
    assert (model.config.eos_token_id, model.generation_config.pad_token_id) == ids
    assert model.config.bos_token_id is None
    tokens = tokenizer("w3 w1 w4 w1 w5 w9 w2 w6", return_tensors="pt")
    reference = AutoModelForCausalLM.from_pretrained(hf, **eager).eval()
    with torch.no_grad():
        # Megatron's, within what test_the_logits_are_those_of_transformers allows.
        assert torch.equal(model(**tokens).logits, reference(tokens.input_ids).logits)
    writer = pipeline("text-generation", model=str(published), tokenizer=tokenizer)
    (answer,) = writer("w3 w1", max_new_tokens=4, do_sample=False)
    assert answer["generated_text"].startswith("w3 w1")
    assert writer.model.generation_config.eos_token_id == ids[0]


@pytest.mark.slow
def test_generation_ends_where_training_put_the_end(converted, tmp_path):
    """The likeliest first token is made the end: nothing comes behind it."""
    import shutil

    from transformers import AutoModelForCausalLM

    _, _, published, _ = converted("llama31-8b")
    made = shutil.copytree(published, tmp_path / "model")
    prompt = {"input_ids": torch.tensor([[3, 1]]), "attention_mask": torch.ones(1, 2)}
    options = {"max_new_tokens": 6, "do_sample": False}
    whole = AutoModelForCausalLM.from_pretrained(made).generate(**prompt, **options)[0]
    assert len(whole) == 8
    rows, end, first = tensors(made), VOCABULARY - 2, int(whole[2])
    head = rows["lm_head.weight"].clone()
    head[[first, end]] = head[[end, first]]
    write(made, **rows | {"lm_head.weight": head})
    cut = AutoModelForCausalLM.from_pretrained(made).generate(**prompt, **options)[0]
    assert cut.tolist() == [3, 1, end]


@pytest.mark.slow
def test_another_dtype_is_each_tensor_rounded(converted, vendored, tmp_path):
    hf, checkpoint, *_ = converted("llama31-8b")
    padded = checkpoint.with_name("padded")
    back = tmp_path / "back"
    convert.megatron_to_hf(vendored.root, padded, back, vocab_size=VOCABULARY, dtype="bf16")
    expected = {name: tensor.bfloat16() for name, tensor in tensors(hf).items()}
    write(tmp_path, **expected)
    assert differing(tmp_path, back) == []
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_value_that_a_dtype_cannot_hold_is_named(program):
    small, large = torch.tensor([1.0, -65504.0]), torch.tensor([1.0, 7e4])
    assert torch.equal(program.cast("a", small, torch.float16), small.half())
    with pytest.raises(program.SavedError, match=r"a .*70000.*65504.*--dtype"):
        program.cast("a", large, torch.float16)
    broken = torch.tensor([torch.inf, torch.nan])  # of a run that diverged: kept as it is
    assert program.cast("a", broken, torch.float16).isnan().tolist() == [False, True]
    whole = program.cast("a", large, torch.float32)
    assert torch.equal(whole, large) and whole.data_ptr() != large.data_ptr()


@pytest.mark.slow
def test_bf16_stays_bf16_and_a_tensor_less_is_named(converted, vendored, tmp_path):
    random_model("llama32-1b").bfloat16().save_pretrained(tmp_path / "hf")
    convert.hf_to_megatron(vendored.root, tmp_path / "hf", tmp_path / "checkpoint")
    convert.megatron_to_hf(vendored.root, tmp_path / "checkpoint", tmp_path / "back")
    assert differing(tmp_path / "hf", tmp_path / "back") == []
    rest = tensors(tmp_path / "hf")
    del rest["model.norm.weight"]
    write(tmp_path / "hf", **rest)
    with pytest.raises(ConvertError, match=r"1 tensors are missing: model\.norm\.weight"):
        convert.hf_to_megatron(vendored.root, tmp_path / "hf", tmp_path / "another")
    assert not (tmp_path / "another").exists()


def test_the_factor_of_the_scaling_reaches_the_model(vendored):
    """Also of a training: upstream's configuration does not take it from the arguments."""
    shape = "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    shape += "--max-position-embeddings 32 --position-embedding-type rope --vocab-size 128 "
    shape += "--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import convert\n"
        "convert.use_cpu()\n"
        "_, model = convert.build(sys.argv[2:])\n"
        "print(convert.unwrapped(model).rotary_pos_emb.inv_freq[-1].item())"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, vendored.root / "tools"]
    done = forking.run([*command, *shape.split(), *CPU])
    assert done.returncode == 0, done.stderr[-4000:]
    # The slowest of a head's 8 frequencies turns less than once within the original context.
    assert float(done.stdout.split()[-1]) == pytest.approx(500000 ** (-7 / 8) / 32)


# -- a real model ----------------------------------------------------------------------------------


@pytest.fixture
def smollm2(tmp_path):
    """SmolLM2-135M-Instruct as an HF folder."""
    program = Path(__file__).with_name("smollm2.py")
    subprocess.run([sys.executable, "-W", "ignore", program, tmp_path / "hf"], check=True)
    return tmp_path / "hf"


@pytest.mark.heavy
@pytest.mark.slow
def test_smollm2_goes_there_and_back(smollm2, vendored, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = convert.hf_to_megatron(vendored.root, smollm2, tmp_path / "checkpoint")
    flags = (*made.flags, "--vocab-size", "49152")
    assert logits(vendored.root, smollm2, tmp_path / "checkpoint", *flags)["difference"] < 1e-4
    back = tmp_path / "back"
    convert.megatron_to_hf(vendored.root, tmp_path / "checkpoint", back, tokenizer=smollm2)
    assert differing(smollm2, back) == []
    tokenizer = AutoTokenizer.from_pretrained(back)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = AutoModelForCausalLM.from_pretrained(back).generate(
        **prompt, max_new_tokens=8, do_sample=False
    )
    assert "Paris" in tokenizer.decode(answer[0])
