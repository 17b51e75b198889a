"""Detect settings that would silently bypass quantization, before the first step.

The functions are pure; mqo/megatron/run reads their inputs from the arguments and the model.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mqo.megatron.layers import OTHER, ROUTER
from mqo.megatron.transformer_engine import releases
from mqo.quant.formats import ATTENTION, LINEAR, SITES, GemmSite
from mqo.quant.labels import Layer

IsExcluded = Callable[[str, str], bool]


@dataclass(frozen=True)
class Setup:
    """The arguments that decide whether a GEMM reaches its site. The defaults are harmless.

    weight_shards: number of ranks from which a weight is gathered before each GEMM.
    attention_variant: name of an attention that is not DotProductAttention. grouped_experts:
    whether all experts of a layer are one GEMM, which has no sites. cuda_graphs: whether a step
    or part of it is captured and replayed. engine_faults: reasons why layers of Transformer Engine
    would not be quantized, one text each.
    """

    transformer_impl: str = "local"
    engine_faults: tuple[str, ...] = ()
    attention_variant: str | None = None
    deferred_embedding_wgrad: bool = False
    weight_shards: int = 1
    grouped_experts: bool = False
    cuda_graphs: bool = False


def find_traps(
    types: Mapping[str, str], setup: Setup, layers: Iterable[Layer], is_excluded: IsExcluded
) -> list[str]:
    """Return one text per cause that would leave GEMMs unquantized, with the flag to change.

    Args:
        types: site -> quant type; an absent site has 'none'.
        setup: the same on all ranks.
        layers: from all ranks, because a pipeline stage may have none of a kind.
        is_excluded: whether the run excludes (site, layer).
    """
    wanted = _wanted(types)
    kinds = {site.layer for site in wanted}
    layers = sorted(set(layers), key=lambda layer: layer.name)
    traps = setup_traps(types, setup, is_excluded)
    for kind in sorted(kinds, reverse=True):
        names = [site.name for site in wanted if site.layer == kind]
        here = [layer for layer in layers if layer.kind == kind]
        if not here:
            traps.append(f"{', '.join(names)}: no layer of the model has such a GEMM")
        here = [x for x in here if not all(is_excluded(site, x.name) for site in names)]
        traps += _layer_traps(here)
    grouped = [layer for layer in layers if layer.kind == OTHER and "Grouped" in layer.module]
    # setup_traps reports it if the arguments select it.
    if LINEAR in kinds and grouped and not setup.grouped_experts:
        traps.append(f"{listed(grouped)} bypasses the linear sites: leave out --moe-grouped-gemm")
    return traps


def setup_traps(types: Mapping[str, str], setup: Setup, is_excluded: IsExcluded) -> list[str]:
    """Return the part of `find_traps` that needs only the run's arguments, no model."""
    kinds = {site.layer for site in _wanted(types)}
    traps: list[str] = []
    if LINEAR in kinds and setup.transformer_impl == releases.NAME:
        traps += setup.engine_faults
    elif kinds and setup.transformer_impl not in ("local", releases.NAME):
        traps.append(
            f"--transformer-impl {setup.transformer_impl}: its layers do not call the sites; "
            "pass --transformer-impl local"
        )
    if ATTENTION in kinds and setup.attention_variant:
        traps.append(
            f"--experimental-attention-variant {setup.attention_variant}: its GEMMs are not the "
            "qk and pv sites; leave it out, or set qk and pv to none"
        )
    if kinds and setup.cuda_graphs:
        traps.append(
            "--cuda-graph-impl: a graph replays the captured quantizers, with the same random "
            "numbers and types in all steps, and without records; pass --cuda-graph-impl none"
        )
    head = "output_layer"
    wgrad = types.get("wgrad", "none") != "none" and not is_excluded("wgrad", head)
    if wgrad and setup.deferred_embedding_wgrad:
        traps.append(
            f"--defer-embedding-wgrad-compute: the wgrad of {head} bypasses its site; leave it "
            f"out, or exclude 'wgrad:{head}'"
        )
    if LINEAR in kinds and setup.weight_shards > 1:
        traps.append(
            f"weights are gathered from {setup.weight_shards} ranks and lose their layers' names; "
            "leave out --tensor-parallel-num-weight-shards and its form for experts"
        )
    if LINEAR in kinds and setup.grouped_experts:
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
