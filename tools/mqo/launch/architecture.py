"""The flags of a model's architecture, and the user's flags that change it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from mqo.launch.command import flag_table
from mqo.matrix import layer_pattern, tables
from mqo.matrix.tables import Activation, Llama3Rope, Mamba, Mla, Moe, Shape, Yarn

# Flags of `architecture_flags` that configure the training: no value of them changes the model.
_OF_TRAINING = frozenset(
    {
        *("--seq-length", "--max-position-embeddings", "--make-vocab-size-divisible-by"),
        *("--attention-dropout", "--hidden-dropout", "--moe-aux-loss-coeff"),
        *("--moe-router-load-balancing-type", "--moe-router-dtype"),
    }
)
# More of upstream's flags that change a model's shape or function, at any value.
_FURTHER = frozenset(
    {
        # blocks
        *("--spec", "--yaml-cfg", "--use-checkpoint-args", "--is-hybrid-model"),
        *(layer_pattern.FLAG, "--hybrid-override-pattern"),
        *("--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"),
        *("--apply-layernorm-1p", "--use-mup", "--apply-residual-connection-post-layernorm"),
        # attention
        *("--kv-channels", "--q-lora-rank", "--window-size", "--attention-output-gate"),
        *("--add-qkv-bias", "--qk-l2-norm", "--experimental-attention-variant"),
        # positions
        *("--rotary-interleaved", "--rotary-seq-len-interpolation-factor", "--no-rope-freq"),
        *("--no-position-embedding", "--mrope-section"),
        *("--yarn-original-max-position-embeddings", "--yarn-beta-fast", "--yarn-beta-slow"),
        # MLPs and experts
        *("--quick-geglu", "--openai-gelu", "--activation-func-clamp-value"),
        *("--moe-router-enable-expert-bias", "--moe-router-group-topk"),
        *("--moe-shared-expert-gate", "--moe-latent-size", "--moe-input-jitter-eps"),
        *("--moe-apply-probs-on-input", "--moe-expert-capacity-factor"),
    }
)
_ACTIVATIONS: Mapping[Activation, str] = {
    "swiglu": "--swiglu",
    "squared_relu": "--squared-relu",
}
# More flags, with upstream's default, which changes nothing.
_DEFAULTS: Mapping[str, str] = {
    "--mtp-num-layers": "0",
    "--softmax-type": "vanilla",
    "--rotary-percent": "1",
    "--glu-linear-offset": "0",
    "--moe-router-num-groups": "1",
    "--moe-router-topk-scaling-factor": "1",
}


def architecture_changes(model: Shape, extra_flags: Sequence[str]) -> dict[str, str]:
    """Return {flag: value} of the flags that change the architecture; a switch has the value ''."""
    own = flag_table(architecture_flags(model, 1))
    given = flag_table(extra_flags)
    return {
        flag: given[flag]
        for flag in given
        if flag in _known() and not _same(given[flag], own.get(flag, _DEFAULTS.get(flag)))
    }


@functools.cache
def _known() -> frozenset[str]:
    """Return the flags that define an architecture: those of all published models, and more."""
    published = (flag_table(architecture_flags(model, 1)) for model in tables.models().values())
    return (_FURTHER | _DEFAULTS.keys()).union(*published) - _OF_TRAINING


def _same(given: str, own: str | None) -> bool:
    """Return whether two values of a flag are equal, as numbers if they are numbers."""
    if own is None or given == own:
        return given == own
    try:
        return float(given) == float(own)
    except ValueError:
        return False


def architecture_flags(model: Shape, sequence: int, stages: int = 1) -> list[str]:
    """Return the flags of the model; `sequence` is in tokens.

    A HybridModel's pattern is split into `stages` pipeline stages; PatternError if it cannot be.
    """
    flags = [
        f"--num-layers {model.num_layers}"
        if model.pattern is None
        # A pattern that begins with an MLP (-) would be read as a flag.
        else f"{layer_pattern.FLAG}={layer_pattern.in_stages(model.pattern, stages)}",
        f"--hidden-size {model.hidden_size}",
        f"--ffn-hidden-size {model.ffn_hidden_size}",
        f"--num-attention-heads {model.num_attention_heads}",
        _mla(model.mla) if model.mla else _grouped(model),
        f"--normalization RMSNorm --norm-epsilon {model.norm_epsilon:.12g}",
        _ACTIVATIONS[model.activation],
        "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0",
        _positions(model),
        _moe(model.moe) if model.moe else "",
        _expert_layers(model),
        _mamba(model.mamba) if model.mamba else "",
        f"--seq-length {sequence} --max-position-embeddings {sequence}",
        "--make-vocab-size-divisible-by 128",
    ]
    return words_of(
        flags + ([] if model.tied_embeddings else ["--untie-embeddings-and-output-weights"])
    )


def _grouped(model: Shape) -> str:
    """Return the flags of grouped queries."""
    words = {
        f"--group-query-attention --num-query-groups {model.num_query_groups}": True,
        f"--kv-channels {model.head_dim}": model.head_dim is not None,
        "--add-qkv-bias": model.qkv_bias,
        "--qk-layernorm": model.qk_norm,
    }
    return " ".join(word for word, given in words.items() if given)


def _mla(mla: Mla) -> str:
    """Return MLA's flags; without --q-lora-rank, one projection makes the queries."""
    return (
        f"--multi-latent-attention --qk-layernorm --kv-lora-rank {mla.kv_lora_rank} "
        f"--qk-head-dim {mla.qk_head_dim} --qk-pos-emb-head-dim {mla.qk_pos_emb_head_dim} "
        f"--v-head-dim {mla.v_head_dim}"
    )


def _positions(model: Shape) -> str:
    """Return the flags of rotary positions, or of none."""
    if model.rotary_base is None:
        return "--position-embedding-type none"
    return f"--position-embedding-type rope --rotary-base {model.rotary_base} {_rope(model)}"


def _rope(model: Shape) -> str:
    """Return the flags of scaled rotary positions; upstream's defaults match the other values."""
    match model.rope:
        case Yarn(factor=factor, mscale=mscale, mscale_all_dim=all_dim):
            return (
                f"--rope-type yarn --rotary-scaling-factor {factor} "
                f"--mscale {mscale:.12g} --mscale-all-dim {all_dim:.12g}"
            )
        case Llama3Rope(factor=factor):
            return f"--use-rope-scaling --rope-scaling-factor {factor}"
    # MLA's own default is yarn.
    return "--rope-type rope" if model.mla else ""


def _expert_layers(model: Shape) -> str:
    """Return the flag for the blocks of a GPT that have experts; '' for those of a pattern."""
    if model.moe is None or model.pattern is not None:
        return ""
    dense = model.moe.dense_layers
    return f"--moe-layer-freq [0]*{dense}+[1]*{model.num_layers - dense}"


def _mamba(mamba: Mamba) -> str:
    """Return the flags of Mamba-2 layers."""
    return (
        f"--mamba-num-heads {mamba.num_heads} --mamba-head-dim {mamba.head_dim} "
        f"--mamba-num-groups {mamba.num_groups} --mamba-state-dim {mamba.state_dim}"
    )


def _moe(moe: Moe) -> str:
    """Return the flags of experts without grouped GEMMs; the user may add --moe-grouped-gemm.

    As published, the router computes the softmax in fp32: over all experts before the top-k, or
    over the top-k, which renormalizes it.
    """
    shared = f"--moe-shared-expert-intermediate-size {moe.shared_ffn_size}"
    return (
        f"--num-experts {moe.num_experts} --moe-router-topk {moe.topk} "
        f"--moe-ffn-hidden-size {moe.expert_ffn_size} {shared if moe.shared_experts else ''} "
        f"--moe-router-score-function softmax "
        f"{'' if moe.renormalized else '--moe-router-pre-softmax'} --moe-router-dtype fp32 "
        f"--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff {moe.aux_loss:g}"
    )


def words_of(lines: list[str]) -> list[str]:
    """Return the words in lines of flags."""
    return " ".join(lines).split()
