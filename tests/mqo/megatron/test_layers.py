"""Layer names on small models shaped like Megatron's: tied, untied, wrapped, a pipeline stage."""

import pytest
import torch
from mqo.megatron.layers import find_layers, label_layers, other_weights
from mqo.quant.labels import Layer, exempt, is_exempt
from torch import nn


class DotProductAttention(nn.Module):
    pass


class LatentAttention(DotProductAttention):
    pass


class VocabParallelEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4))


class TransformerLayer(nn.Module):
    def __init__(self, layer_number, attention=DotProductAttention):
        super().__init__()
        self.layer_number = layer_number
        self.norm = nn.LayerNorm(4)
        self.self_attention = nn.ModuleDict({"core": attention(), "proj": nn.Linear(4, 4)})
        self.mlp = nn.ModuleDict({"linear_fc1": nn.Linear(4, 8, bias=False)})


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight


class Model(nn.Module):
    def __init__(self, *, tied, first_layer=1, embedding=True, head=True):
        super().__init__()
        self.share_embeddings_and_output_weights = tied
        if embedding:
            self.embedding = nn.ModuleDict({"word_embeddings": VocabParallelEmbedding()})
        self.decoder = nn.ModuleDict(
            {"layers": nn.ModuleList(TransformerLayer(first_layer + i) for i in range(2))}
        )
        if head:
            own = not (tied and embedding)
            self.output_layer = Head(nn.Parameter(torch.zeros(8, 4)) if own else None)


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def labels(model):
    """Every label that a Parameter or a module of `model` carries."""
    owners = [*model.parameters(), *model.modules()]
    return {owner.mqo_layer for owner in owners if hasattr(owner, "mqo_layer")}


def layer_labels(*indices):
    names = ("self_attention.core", "self_attention.proj", "mlp.linear_fc1")
    return {f"decoder.layers.{i}.{name}" for i in indices for name in names}


def test_an_untied_model_has_a_label_for_embedding_and_head():
    model = Model(tied=False)
    assert label_layers(model) == 8
    assert labels(model) == layer_labels(0, 1) | {"embedding.word_embeddings", "output_layer"}
    assert model.embedding.word_embeddings.weight.mqo_layer == "embedding.word_embeddings"
    assert model.output_layer.weight.mqo_layer == "output_layer"


def test_a_tied_weight_is_the_output_layers():
    model = Model(tied=True)
    assert label_layers(model) == 7
    assert model.embedding.word_embeddings.weight.mqo_layer == "output_layer"
    assert labels(model) == layer_labels(0, 1) | {"output_layer"}


def test_a_head_with_a_weight_of_its_own_leaves_the_embedding_its_name():
    model = Model(tied=True)
    model.output_layer.weight = nn.Parameter(torch.zeros(8, 4))
    label_layers(model)
    assert model.output_layer.weight.mqo_layer == "output_layer"
    assert model.embedding.word_embeddings.weight.mqo_layer == "embedding.word_embeddings"


def test_a_weight_held_by_both_modules_is_the_output_layers():
    model = Model(tied=False)
    model.output_layer.weight = model.embedding.word_embeddings.weight
    label_layers(model)
    assert model.output_layer.weight.mqo_layer == "output_layer"


def test_any_other_holder_of_an_embeddings_weight_names_it():
    model = nn.ModuleDict({"proj": nn.Linear(4, 8), "table": nn.Embedding(8, 4)})
    model["table"].weight = model["proj"].weight
    label_layers(model)
    assert labels(model) == {"proj"}


def test_a_subclass_of_dot_product_attention_is_labeled():
    model = nn.ModuleDict({"layers": nn.ModuleList([TransformerLayer(1, LatentAttention)])})
    label_layers(model)
    assert model["layers"][0].self_attention.core.mqo_layer == "layers.0.self_attention.core"


def test_wrappers_leave_no_trace_in_the_names():
    for tied in (False, True):
        bare, wrapped = Model(tied=tied), Wrapper(Wrapper(Model(tied=tied)))
        assert label_layers(wrapped) == label_layers(bare)
        assert labels(wrapped) == labels(bare)


def test_a_pipeline_stage_numbers_its_layers_over_the_whole_model():
    stage = Model(tied=True, first_layer=5, embedding=False)
    label_layers(Wrapper(stage))
    assert labels(stage) == layer_labels(4, 5) | {"output_layer"}


def test_a_first_stage_without_a_head_names_the_embedding():
    stage = Model(tied=True, head=False)
    label_layers(stage)
    assert stage.embedding.word_embeddings.weight.mqo_layer == "embedding.word_embeddings"


def test_layers_without_a_number_keep_their_index():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
    label_layers(model)
    assert labels(model) == {"layers.0", "layers.1"}


def test_experts_are_numbered_over_all_ranks():
    layer = nn.ModuleDict(
        {"experts": nn.ModuleDict({"local_experts": nn.ModuleList([nn.Linear(4, 8)] * 1)})}
    )
    layer.local_expert_indices = [5]
    label_layers(nn.ModuleDict({"mlp": layer}))
    assert labels(layer) == {"mlp.experts.local_experts.5"}


def test_a_prefix_stands_before_every_name():
    model = Model(tied=True)
    label_layers(model, prefix="teacher")
    assert labels(model) == {f"teacher.{name}" for name in layer_labels(0, 1) | {"output_layer"}}
    lone = nn.Linear(4, 4)
    label_layers(lone, prefix="student")
    assert lone.weight.mqo_layer == "student"


def test_labeling_twice_gives_the_same_names():
    model = Model(tied=True)
    first = label_layers(model), labels(model)
    assert (label_layers(model), labels(model)) == first


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4))


class TopKRouter(Router):
    pass


def test_layers_are_found_with_kind_class_and_whether_they_are_frozen():
    model = Model(tied=True)
    model.decoder.layers[1].mlp["router"] = TopKRouter()
    model.decoder.layers[0].mlp.linear_fc1.weight.requires_grad_(False)
    found = {one.layer.name: one for one in find_layers(model)}
    assert set(found) == labels(model)
    fc1, core = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.self_attention.core"
    linear, attention = (model.decoder.layers[0].mlp.linear_fc1, model.decoder.layers[1])
    attention = attention.self_attention.core
    assert found[fc1] == (Layer(fc1, "linear", "Linear", True, False), linear, linear.weight)
    assert found[core] == (Layer(core, "attention", "DotProductAttention"), attention, attention)
    # The weight is the embedding's, the layer that uses it in a GEMM the head.
    head, weight = model.output_layer, model.embedding.word_embeddings.weight
    expected = Layer("output_layer", "linear", "Head", sited=False)
    assert found["output_layer"] == (expected, head, weight)
    assert found["decoder.layers.1.mlp.router"].layer.kind == "router"


def test_an_embedding_is_no_linear_layer():
    kinds = {one.layer.name: one.layer.kind for one in find_layers(Model(tied=False))}
    assert kinds["embedding.word_embeddings"] == "embedding"


class ColumnParallelLinear(Head):
    pass


class Adapted(ColumnParallelLinear):
    pass


@pytest.mark.parametrize("kind", [ColumnParallelLinear, Adapted])
def test_a_parallel_linear_layer_calls_the_sites(kind):
    (one,) = find_layers(nn.ModuleDict({"proj": kind(nn.Parameter(torch.zeros(8, 4)))}))
    assert one.layer == Layer("proj", "linear", kind.__name__)


class GroupedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight1 = nn.Parameter(torch.zeros(8, 4))
        self.scale = nn.Parameter(torch.zeros(8))


def test_matrices_without_a_label_are_told_apart():
    model = Wrapper(nn.ModuleDict({"experts": GroupedMLP(), "proj": nn.Linear(4, 4)}))
    label_layers(model)
    assert other_weights(model) == [
        Layer("experts.weight1", "other", "GroupedMLP", frozen=False, sited=False)
    ]


def test_what_is_exempt_is_found_by_nobody():
    model = nn.ModuleDict({"own": Model(tied=True), "teacher": exempt(Model(tied=True))})
    model["experts"] = exempt(GroupedMLP())
    assert {one.layer.name.split(".")[0] for one in find_layers(model)} == {"own"}
    assert not other_weights(model)
    assert is_exempt(model["teacher"].embedding.word_embeddings.weight)
    assert not is_exempt(model["own"].embedding.word_embeddings.weight)
    assert not find_layers(model["teacher"])
