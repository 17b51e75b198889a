"""A program of the tests: what changes the logits of a model, and what a published folder keeps.

    python published_logits.py TREE KIND RESULT

KIND is grouped or latent. RESULT gets four tables: "arguments" and "keys" have the largest
difference of logits after a change that should have no effect, "published" and "imported" the one
between Megatron and transformers after a change that the other side must take over. A text in the
place of a number is the error that the change ended in. "refused" is like "arguments", for
arguments that must have their default. "parser", "flags" and "validated" list arguments.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LENGTH = 48
VOCABULARY = 131
# Values that a type does not suggest.
OTHERS: dict[str, list[Any]] = {
    "window_size": [(8, 0)],
    "no_rope_freq": [2],
    "rotary_seq_len_interpolation_factor": [4],
    "activation_func_clamp_value": [0.01],
    "glu_linear_offset": [1.0],
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss", "none"],
}
BASE = {
    "num-layers": 2,
    "hidden-size": 64,
    "ffn-hidden-size": 96,
    "num-attention-heads": 4,
    "rotary-base": 10000,
    "norm-epsilon": 1e-5,
    "max-position-embeddings": 256,
    "seq-length": 64,
    "vocab-size": VOCABULARY,
    "make-vocab-size-divisible-by": 1,
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "position-embedding-type": "rope",
    "attention-dropout": 0,
    "hidden-dropout": 0,
}
GROUPED = BASE | {
    "group-query-attention": True,
    "num-query-groups": 2,
    "use-rope-scaling": True,
    "rope-scaling-factor": 8.0,
}
LATENT = BASE | {
    "norm-epsilon": 1e-6,
    "multi-latent-attention": True,
    "qk-layernorm": True,
    "kv-lora-rank": 32,
    "qk-head-dim": 16,
    "qk-pos-emb-head-dim": 8,
    "v-head-dim": 24,
    "rope-type": "yarn",
    "rotary-scaling-factor": 40,
    "mscale": 0.707,
    "mscale-all-dim": 0.707,
    "num-experts": 8,
    "moe-router-topk": 3,
    "moe-layer-freq": "[0]*1+[1]*1",
    "moe-ffn-hidden-size": 32,
    "moe-shared-expert-intermediate-size": 64,
    "moe-router-score-function": "softmax",
    "moe-router-pre-softmax": True,
    "moe-router-dtype": "fp32",
    "moe-router-load-balancing-type": "seq_aux_loss",
    "moe-aux-loss-coeff": 0.001,
}
# As in Qwen3-MoE and Mixtral.
EXPERTS = {
    "num-experts": 4,
    "moe-router-topk": 2,
    "moe-ffn-hidden-size": 32,
    "moe-router-dtype": "fp32",
    "moe-router-load-balancing-type": "seq_aux_loss",
}
FLAGS = {"grouped": GROUPED, "latent": LATENT}
# Changes of flags that config.json must express; None takes a flag away.
COMMON_CHANGES: list[dict[str, Any]] = [
    {},
    {"num-layers": 3, "moe-layer-freq": "[0]*1+[1]*2"},
    {"hidden-size": 96},
    {"ffn-hidden-size": 128},
    {"num-attention-heads": 8},
    {"rotary-base": 500},
    {"max-position-embeddings": 128},
    {"vocab-size": 140},
    {"make-vocab-size-divisible-by": 128},
    {"untie-embeddings-and-output-weights": None},
    {"mtp-num-layers": 0},
]
CHANGES = {
    "grouped": [
        *COMMON_CHANGES,
        {"norm-epsilon": 1e-2},
        {"num-query-groups": 4},
        {"group-query-attention": None, "num-query-groups": None},
        {"use-rope-scaling": None},
        {"rope-scaling-factor": 2.0},
        {"kv-channels": 24},
        {"add-qkv-bias": True},
        {"qk-layernorm": True},
        EXPERTS | {"qk-layernorm": True, "moe-layer-freq": "[0]*1+[1]*1"},
        EXPERTS | {"qk-layernorm": True, "moe-router-pre-softmax": True},
        EXPERTS,
    ],
    "latent": [
        *COMMON_CHANGES,
        {"kv-lora-rank": 48},
        {"qk-head-dim": 24},
        {"qk-pos-emb-head-dim": 16},
        {"v-head-dim": 16},
        {"rope-type": "rope", "rotary-scaling-factor": None},
        {"rotary-scaling-factor": 4},
        {"mscale": 1.0},
        {"mscale-all-dim": 0.4},
        {"mscale": 1.0, "mscale-all-dim": 0.0},
        {"num-experts": 6},
        {"moe-router-topk": 2},
        {"moe-layer-freq": "[1]*2"},
        {"moe-ffn-hidden-size": 64},
        {"moe-shared-expert-intermediate-size": 96},
        {"moe-aux-loss-coeff": 0.1},
        {"moe-router-num-groups": 1, "moe-router-group-topk": 1},
        {"moe-router-topk-scaling-factor": 1.0},
        {"moe-router-load-balancing-type": "aux_loss"},
        {"moe-router-load-balancing-type": "global_aux_loss"},
        {"moe-router-load-balancing-type": "none"},
        {
            "moe-router-load-balancing-type": "seq_aux_loss aux_loss",
            "moe-aux-loss-coeff": "0.1 0.2",
        },
    ],
}
ROPE = {
    "grouped": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}
    | {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "latent": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0}
    | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707}
    | {"original_max_position_embeddings": 4096, "truncate": True, "attention_factor": None},
}
CONFIG: dict[str, dict[str, Any]] = {
    "grouped": {"num_key_value_heads": 2, "head_dim": 16},
    "latent": {
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
    },
}
CONFIG_BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
# Changes of config.json that a checkpoint must take over; those of "rope" are of its scaling.
COMMON_KEYS: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 3},
    {"hidden_size": 96, "head_dim": None},
    {"intermediate_size": 128},
    {"vocab_size": 140},
    {"max_position_embeddings": 128},
    {"tie_word_embeddings": True},
    {"rope": {"rope_theta": 500.0}},
    {"rope": {"rope_type": "default"}},
    {"rope": {"partial_rotary_factor": 1.0}},
    {"rope": {"factor": 4.0}},
]
KEYS = {
    "grouped": [
        *COMMON_KEYS,
        {"rms_norm_eps": 1e-2},
        {"num_attention_heads": 8, "head_dim": 8},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": None},
    ],
    "latent": [
        *COMMON_KEYS,
        {"num_attention_heads": 8, "num_key_value_heads": 8},
        {"kv_lora_rank": 48},
        {"qk_nope_head_dim": 24},
        {"qk_rope_head_dim": 16},
        {"v_head_dim": 16},
        {"first_k_dense_replace": 0},
        {"n_routed_experts": 6},
        {"num_experts_per_tok": 2},
        {"n_shared_experts": 1},
        {"moe_intermediate_size": 64},
        {"n_group": 1},
        {"aux_loss_alpha": 0.1},
        {"rope": {"mscale": 1.0, "mscale_all_dim": 0.4}},
        {"rope": {"mscale": 1.0, "mscale_all_dim": 0.0}},
    ],
}
# Values of keys without effect; of any other key, of its type.
KEY_VALUES: dict[str, Any] = {
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "pretraining_tp": 2,
    "attention_dropout": 0.5,
    "topk_group": 2,
    "initializer_range": 0.5,
    "output_router_logits": True,
    "use_cache": False,
    "output_attentions": False,
    "return_dict": True,
    "id2label": {"0": "a"},
    "label2id": {"a": 0},
    "auto_map": {"AutoConfig": "x.Y"},
    "_attn_implementation": "sdpa",
    "attn_implementation": "sdpa",
    "task_specific_params": {},
    "pruned_heads": {},
    "problem_type": "regression",
    "tokenizer_class": "X",
    "is_encoder_decoder": False,
}


class Lab:
    """Models of one kind in this process, with the same weights."""

    def __init__(self, tree: Path, kind: str, folder: Path) -> None:
        """Take the tree's megatron."""
        sys.path[:0] = [str(tree / "tools"), str(ROOT / "tools")]
        import convert

        convert.use_cpu()
        import torch

        self.convert, self.torch, self.kind, self.folder = convert, torch, kind, folder
        self.count, self.ready = 0, False
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)

    def parsed(self, change: dict[str, Any]) -> Namespace:
        """Return upstream's arguments after validation."""
        from megatron.training import arguments
        from mqo.launch.flags import platform_flags
        from mqo.launch.machine import Machine

        flags = [*platform_flags(Machine(1, 0))]
        for name, value in (FLAGS[self.kind] | change).items():
            if value is not None:
                words = [] if value is True else str(value).split(" ")
                flags += [f"--{name}", *words]
        sys.argv[1:] = [*flags, *self.convert.ONE_PROCESS]
        with contextlib.redirect_stdout(io.StringIO()):
            args = arguments.parse_args()
            arguments.validate_args(args)
        return args

    def build(self, args: Namespace) -> Any:
        """Return the model of the arguments, with random weights that do not depend on it."""
        from megatron.inference import one_process
        from megatron.inference.gpt.model_provider import model_provider
        from megatron.inference.gpt.releases import bare_model
        from megatron.training import global_vars

        if not self.ready:
            one_process.build(args)
            self.ready = True
        global_vars.unset_global_variables()
        global_vars.set_args(args)
        model = bare_model(args, model_provider).eval()
        self.fill(model)
        return model

    def fill(self, model: Any) -> None:
        """Give a model weights so large that logits are some units, and norms that are not 1."""
        self.torch.manual_seed(1)
        for name, parameter in sorted(model.named_parameters()):
            mean = 1.0 if "norm" in name else 0.0
            self.torch.nn.init.normal_(parameter, mean, 0.2)

    def logits(self, model: Any) -> Any:
        """Return Megatron's logits."""
        positions = self.torch.arange(LENGTH).expand(2, -1)
        with self.torch.no_grad():
            return model(self.tokens, positions, None)

    def theirs(self, folder: Path) -> Any:
        """Return the logits of transformers."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=self.torch.float32, attn_implementation="eager"
        )
        with self.torch.no_grad():
            return model.eval()(self.tokens).logits

    def new_folder(self) -> Path:
        """Return a new folder."""
        self.count += 1
        made = self.folder / str(self.count)
        made.mkdir()
        return made

    # -- arguments without effect ------------------------------------------------------------------

    def arguments(self, names: list[str], actions: dict[str, Any]) -> dict[str, Any]:
        """Return by name how far the logits move when an argument has another value."""
        read: set[str] = set()

        class Recorded(Namespace):
            def __getattribute__(self, name: str) -> Any:
                read.add(name)
                return super().__getattribute__(name)

        before = vars(self.parsed({}))
        expected = self.logits(self.build(Recorded(**before)))

        def moved(change: dict[str, Any]) -> float:
            with contextlib.redirect_stdout(io.StringIO()):
                model = self.build(Namespace(**before | change))
            return (self.logits(model) - expected).abs().max().item()

        found: dict[str, Any] = {}
        present = [name for name in names if name in before]
        unread = {n: next(iter(others(n, before[n], actions))) for n in present if n not in read}
        together = moved(unread)
        for name in present:
            if name in unread:
                found[name] = together
                continue
            for value in others(name, before[name], actions):
                try:
                    found[name] = max(moved({name: value}), found.get(name, 0.0))
                except Exception as error:  # of whichever check of upstream's refuses it
                    found.setdefault(name, f"{type(error).__name__}: {error}")
                if isinstance(found[name], str):
                    continue
        return found

    # -- Megatron to transformers ------------------------------------------------------------------

    def published(self, change: dict[str, Any]) -> float:
        """Return how far a published model is from Megatron's."""
        from mqo.launch.hf_config import config_of, context_of, shape_of_args
        from mqo.launch.published_args import check_published
        from safetensors.torch import save_file

        args = self.parsed(change)
        model = self.build(args)
        saved = json.loads(json.dumps(vars(args), default=str))
        check_published(saved, self.convert.parser_facts())
        shape = shape_of_args(saved)
        folder = self.new_folder()
        config = config_of(shape, "fp32", context_of("the arguments", saved))
        (folder / "config.json").write_text(json.dumps(config))
        tensors = self.convert.hf_tensors(model, folder)
        rows = ("model.embed_tokens.weight", "lm_head.weight")
        kept = {n: t[: shape.vocab_size] if n in rows else t for n, t in tensors.items()}
        save_file({n: t.clone() for n, t in kept.items()}, folder / "model.safetensors")
        ours = self.logits(model)[..., : shape.vocab_size]
        return (ours - self.theirs(folder)).abs().max().item()

    # -- transformers to Megatron ------------------------------------------------------------------

    def config(self, change: dict[str, Any]) -> Any:
        """Return the configuration of transformers."""
        from transformers import AutoConfig

        rest = {k: v for k, v in change.items() if k != "rope"}
        rope = ROPE[self.kind] | change.get("rope", {})
        if rope["rope_type"] == "default":
            rope = {k: rope[k] for k in ("rope_type", "rope_theta")}
        name = {"grouped": "llama", "latent": "deepseek_v2"}[self.kind]
        architecture = {"llama": "LlamaForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM"}[name]
        fields = CONFIG_BASE | CONFIG[self.kind] | rest | {"rope_parameters": rope}
        return AutoConfig.for_model(name, architectures=[architecture], **fields)

    def folder_of(self, change: dict[str, Any]) -> Path:
        """Return a folder of a transformers model with random weights."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(self.config(change))
        self.fill(model)
        folder = self.new_folder()
        model.save_pretrained(folder)
        return folder

    def imported(self, change: dict[str, Any]) -> float:
        """Return how far the converted model is from transformers' own."""
        from megatron.training import arguments
        from modelopt.torch.export import import_mcore_gpt_from_hf
        from mqo.launch.convert import program_flags
        from mqo.launch.hf_config import context_of, shape_of_config

        folder = self.folder_of(change)
        config = json.loads((folder / "config.json").read_text())
        flags = program_flags(shape_of_config(config), context_of("config.json", config))
        sys.argv[1:] = [*flags, *self.convert.ONE_PROCESS]
        with contextlib.redirect_stdout(io.StringIO()):
            args = arguments.parse_args()
            arguments.validate_args(args)
            model = self.build(args)
            import_mcore_gpt_from_hf(model, str(folder), dtype=self.torch.float32)
        return (self.logits(model) - self.theirs(folder)).abs().max().item()

    def keys(self) -> dict[str, Any]:
        """Return by key how far the logits of transformers move when it has another value."""
        from mqo.launch.families import family_of_config
        from mqo.launch.hf_config import keys_without_effect

        folder = self.folder_of({})
        path, found = folder / "config.json", {}
        before = json.loads(path.read_text())
        expected = self.theirs(folder)
        for key in sorted(keys_without_effect() | family_of_config(before).ignored_keys):
            value = KEY_VALUES.get(key, 3)
            path.write_text(json.dumps(before | {key: value}))
            try:
                found[key] = (self.theirs(folder) - expected).abs().max().item()
            except Exception as error:
                found[key] = f"{type(error).__name__}: {error}"
        return found


def others(name: str, value: Any, actions: dict[str, Any]) -> Iterator[Any]:
    """Yield other values of an argument, by the choices and type that its parser has."""
    action = actions.get(name)
    if name in OTHERS:
        yield from (other for other in OTHERS[name] if other != value)
    elif action is not None and action.choices:
        yield from [choice for choice in action.choices if choice != value][:4]
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif value is None and action is not None and action.nargs != 0:
        yield {int: 1, float: 0.5}.get(action.type, "other")
    else:
        yield True if value is None else "other"


def named(change: dict[str, Any]) -> str:
    """Return a name of a change."""
    return json.dumps(change)


def attempt(measure: Any, changes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what `measure` gives for each change, or the error that it ended in."""
    found: dict[str, Any] = {}
    for change in changes:
        try:
            found[named(change)] = measure(change)
        except Exception as error:
            found[named(change)] = f"{type(error).__name__}: {error}"
    return found


def main(tree: str, kind: str, result: str) -> None:
    """Write the tables of one kind of model."""
    target = Path(result).resolve()
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(tree).resolve(), kind, Path(folder))
        os.chdir(folder)  # some arguments name a file to write
        from argparse import ArgumentParser

        from megatron.inference.arguments import add_modelopt_args
        from megatron.training import arguments
        from mqo.launch.published_args import table

        parser = arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False))
        actions = {action.dest: action for action in add_modelopt_args(parser)._actions}
        facts = {
            "parser": sorted(actions.keys() - {"help"}),
            "flags": {flag[2:]: a.dest for a in parser._actions for flag in a.option_strings},
            "validated": sorted(vars(lab.parsed({}))),
            "arguments": lab.arguments(sorted(table().without_effect), actions),
            "refused": lab.arguments(sorted(table().refused), actions),
            "published": attempt(lab.published, CHANGES[kind]),
            "imported": attempt(lab.imported, KEYS[kind]),
            "keys": lab.keys(),
        }
    target.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
