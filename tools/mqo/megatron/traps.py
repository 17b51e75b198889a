"""Detect settings that would silently bypass quantization, before the first step.

`args` are upstream's arguments; one that a release lacks has its default.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping

from mqo.megatron.layers import OTHER, ROUTER
from mqo.megatron.run import engine
from mqo.megatron.transformer_engine.releases import NAME as ENGINE
from mqo.quant.formats import ATTENTION, LINEAR, SITES, GemmSite
from mqo.quant.labels import Layer

IsExcluded = Callable[[str, str], bool]
_SHARDS = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")


def find_traps(
    types: Mapping[str, str], args: Namespace, layers: Iterable[Layer], is_excluded: IsExcluded
) -> list[str]:
    """Return one text per cause that would leave GEMMs unquantized, with the flag to change.

    Args:
        types: site -> quant type; an absent site has 'none'.
        args: the same on all ranks.
        layers: from all ranks, because a pipeline stage may have none of a kind.
        is_excluded: whether the run excludes (site, layer).
    """
    wanted = _wanted(types)
    kinds = {site.layer for site in wanted}
    layers = sorted(set(layers), key=lambda layer: layer.name)
    traps = setup_traps(types, args, is_excluded)
    for kind in sorted(kinds, reverse=True):
        names = [site.name for site in wanted if site.layer == kind]
        here = [layer for layer in layers if layer.kind == kind]
        if not here:
            traps.append(f"{', '.join(names)}: no layer of the model has such a GEMM")
        here = [x for x in here if not all(is_excluded(site, x.name) for site in names)]
        traps += _layer_traps(here)
    grouped = [layer for layer in layers if layer.kind == OTHER and "Grouped" in layer.module]
    # setup_traps reports it if the arguments select it.
    if LINEAR in kinds and grouped and not _groups_experts(args):
        traps.append(f"{listed(grouped)} bypasses the linear sites: leave out --moe-grouped-gemm")
    return traps


def setup_traps(types: Mapping[str, str], args: Namespace, is_excluded: IsExcluded) -> list[str]:
    """Return the part of `find_traps` that needs only the run's arguments, no model."""
    kinds, implementation = {site.layer for site in _wanted(types)}, _implementation(args)
    traps: list[str] = []
    if LINEAR in kinds and implementation == ENGINE:
        traps += engine.faults(args)
    elif kinds and implementation not in ("local", ENGINE):
        traps.append(
            f"--transformer-impl {implementation}: its layers do not call the sites; "
            "pass --transformer-impl local"
        )
    variant = getattr(args, "experimental_attention_variant", None)
    if ATTENTION in kinds and variant:
        traps.append(
            f"--experimental-attention-variant {variant}: its GEMMs are not the "
            "qk and pv sites; leave it out, or set qk and pv to none"
        )
    if kinds and _captures(args):
        traps.append(
            "--cuda-graph-impl: a graph replays the captured quantizers, with the same random "
            "numbers and types in all steps, and without records; pass --cuda-graph-impl none"
        )
    head = "output_layer"
    wgrad = types.get("wgrad", "none") != "none" and not is_excluded("wgrad", head)
    if wgrad and getattr(args, "defer_embedding_wgrad_compute", False):
        traps.append(
            f"--defer-embedding-wgrad-compute: the wgrad of {head} bypasses its site; leave it "
            f"out, or exclude 'wgrad:{head}'"
        )
    # The ranks from which a weight is gathered before each GEMM.
    shards = max(getattr(args, name, None) or 1 for name in _SHARDS)
    if LINEAR in kinds and shards > 1:
        traps.append(
            f"weights are gathered from {shards} ranks and lose their layers' names; "
            "leave out --tensor-parallel-num-weight-shards and its form for experts"
        )
    if LINEAR in kinds and _groups_experts(args):
        traps.append(
            "--moe-grouped-gemm: grouped experts bypass the linear sites; leave it out to run "
            "experts one by one"
        )
    return traps


def notes(types: Mapping[str, str], layers: Iterable[Layer]) -> list[str]:
    """Return notes on matrices without a site, which users might expect to be quantized."""
    linear = (site.name for site in SITES.values() if site.layer == LINEAR)
    if all(types.get(site, "none") == "none" for site in linear):
        return []
    here = [layer for layer in set(layers) if layer.kind in (ROUTER, OTHER)]
    here.sort(key=lambda layer: layer.name)
    return [f"never quantized, because it has no site: {listed([layer])}" for layer in here]


def listed(layers: list[Layer]) -> str:
    """Return the name and class of the first layer, and the number of the others."""
    others = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    return f"{layers[0].name} ({layers[0].module}){others}"


def _wanted(types: Mapping[str, str]) -> list[GemmSite]:
    return [site for site in SITES.values() if types.get(site.name, "none") != "none"]


def _layer_traps(layers: list[Layer]) -> list[str]:
    traps = []
    frozen = [layer for layer in layers if layer.frozen]
    if frozen:
        traps.append(
            f"{listed(frozen)} is frozen, so it bypasses the linear sites: exclude it, or train it "
            "(leave out --freeze-all-layers)"
        )
    foreign = [layer for layer in layers if not layer.sited and not layer.frozen]
    if foreign:
        traps.append(f"{listed(foreign)} does not call the linear sites: exclude it")
    return traps


def _implementation(args: Namespace) -> str:
    return getattr(args, "transformer_impl", None) or "local"


def _captures(args: Namespace) -> bool:
    """Return whether CUDA graphs are enabled; older releases have one switch per kind."""
    switches = ("enable_cuda_graph", "external_cuda_graph")
    selected = getattr(args, "cuda_graph_impl", None) not in (None, "none")
    return selected or any(getattr(args, name, False) for name in switches)


def _groups_experts(args: Namespace) -> bool:
    """Return whether all experts of a layer are one GEMM without sites.

    Transformer Engine's grouped experts have sites, and those of patched source.
    """
    grouped = getattr(args, "num_experts", None) and getattr(args, "moe_grouped_gemm", False)
    if not grouped or _implementation(args) == ENGINE:
        return False
    try:
        from megatron.core.models import backends
    except ImportError:
        return True
    return _implementation(args) != "local" or not hasattr(backends, "experts_class")
