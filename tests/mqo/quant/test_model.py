"""quantize_model: which layers of a model it changes, what it refuses, and what it leaves alone."""

import copy

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.linear import QuantLinear
from mqo.quant.model import quantize_model
from mqo.quant.plugin_decorators import quantizer
from mqo.quant.recipe import Recipe
from mqo.quant.recipe_files import names
from mqo.quant.spec import QuantSpec
from mqo.quant.weights import weights_changed
from torch import nn

BLOCKS, WIDE, TALL, VOCABULARY = 8, 64, 128, 96


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.up, self.down = nn.Linear(WIDE, TALL), nn.Linear(TALL, WIDE)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, head="lm_head"):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDE)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = head
        self.add_module(head, nn.Linear(WIDE, VOCABULARY, bias=False))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        return self.get_submodule(self.head)(x)


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Model()


TOKENS = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(2))


def quantized(model):
    return {name for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def of_blocks(*numbers):
    return {f"layers.{n}.{side}" for n in numbers for side in ("up", "down")}


def losses(model, steps=5):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        logits = model(TOKENS).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, TOKENS.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


ATTENTION_RECIPES = ("sagebwd", "fp8-tensorwise-attention")
LINEAR_RECIPES = {*names()} - {*ATTENTION_RECIPES, "quest"}  # quest has wider blocks


@pytest.mark.parametrize("name", ATTENTION_RECIPES)
def test_types_for_attentions_backward_pass_are_refused(model, name):
    with pytest.raises(ValueError, match="types for products of attention's backward pass"):
        quantize_model(model, name)


@pytest.mark.parametrize("name", sorted(LINEAR_RECIPES))
def test_a_recipe_chooses_the_layers(model, name):
    shared = quantize_model(model, name)
    kept = {block for rule in Recipe.load(name).rules for block in rule.blocks(BLOCKS)}
    assert quantized(model) == of_blocks(*{*range(BLOCKS)} - kept) == {*shared.layers}
    first, *_, last = losses(model)
    assert last < first
    assert shared.idle_layers() == []


def test_a_type_quantizes_every_gemm_of_every_layer(model):
    shared = quantize_model(model, "mxfp4")
    assert quantized(model) == of_blocks(*range(BLOCKS)) | {"lm_head"}
    assert {*shared.types_of("lm_head").values()} == {"mxfp4"}
    losses(model, steps=1)
    assert {(r.site, r.quant_type) for r in shared.records()} == {
        *(("fprop", "mxfp4"), ("dgrad", "mxfp4"), ("wgrad", "mxfp4"))
    }


def test_patterns_choose_layers(model):
    quantize_model(model, "mxfp4", include=["layers.*"], exclude=["*.down", "layers.0.*"])
    assert quantized(model) == {f"layers.{n}.up" for n in range(1, BLOCKS)}


@pytest.mark.parametrize("head", ["lm_head", "output_layer"])
def test_a_recipe_leaves_the_lm_head_unquantized(head):
    model = Model(head)
    quantize_model(model, "mxfp8")
    assert head not in quantized(model)


def test_parameters_hooks_and_the_state_dict_stay(model):
    before = copy.deepcopy(model.state_dict())
    weights = [id(weight) for weight in model.parameters()]
    calls = []
    model.layers[0].up.register_forward_hook(lambda *_: calls.append(1))
    quantize_model(model, "mxfp4")
    assert [id(weight) for weight in model.parameters()] == weights
    assert model.state_dict().keys() == before.keys()
    model.load_state_dict(before)
    model(TOKENS)
    assert calls == [1]


def test_a_seed_changes_random_numbers_alone(model):
    others = [copy.deepcopy(model) for _ in range(2)]
    found = []
    for seed, twin in zip((0, 0, 1), (model, *others), strict=True):
        quantize_model(twin, "mxfp4-backward", seed=seed)
        found.append(losses(twin))
    assert found[0] == found[1] != found[2]
    assert found[0][0] == found[2][0]  # the forward pass draws nothing


def conv(model):
    model.layers[0].conv = nn.Conv1d(4, 4, 3)


def subclass(model):
    class Other(nn.Linear):
        pass

    model.layers[0].up = Other(WIDE, TALL)


def experts(model):
    model.layers[0].experts = nn.Parameter(torch.ones(2, 4, 4))


def patched(model):
    model.layers[0].up.forward = lambda x: x


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (conv, "layers.0.conv.weight"),
        (subclass, "layers.0.up.weight"),
        (experts, "layers.0.experts"),
        (patched, "layers.0.up.weight"),
    ],
)
def test_matrices_that_would_stay_unquantized_are_refused_by_name(model, change, name):
    change(model)
    with pytest.raises(ValueError, match=name):
        quantize_model(model, "mxfp4")
    assert quantized(model) == set()
    quantize_model(model, "mxfp4", exclude=[name])
    assert "lm_head" in quantized(model)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"recipe": "nvfp5"}, "'nvfp5'; valid: .*fp8-blockwise, .*mxfp4.*FILE.toml"),
        ({"recipe": "none"}, "'none'; valid"),
        ({"recipe": "mixed"}, "'mixed'; valid"),
        ({"include": ["model.*"]}, r"'model\.\*' of include matches no layer"),
        ({"exclude": ["lm_haed"]}, "'lm_haed' of exclude matches no layer"),
        ({"exclude": "lm_head"}, "valid: a list"),
        ({"exclude": ["*"]}, "quantizes no layer"),
        ({"recipe": "nvfp4", "blocks": "decoder"}, "'decoder'; valid: layers"),
        ({"recipe": "mxfp8", "blocks": "decoder"}, "'decoder'; valid: layers"),
    ],
)
def test_a_wrong_argument_is_refused_and_changes_nothing(model, arguments, text):
    with pytest.raises(ValueError, match=text):
        quantize_model(model, **{"recipe": "mxfp8"} | arguments)
    assert quantized(model) == set()


@pytest.fixture
def mine():
    """A quantizer that multiplies, in place of a format."""

    @quantizer("mine", options={"factor": 2.0, "n": 1})
    def multiplied(x, context):
        return context.options["factor"] * x

    return "mine"


@pytest.mark.parametrize("options", [None, {}, {"mine": {}}, {"mine": {"factor": 3}}])
def test_the_options_of_a_quantizer_of_the_user_are_set(model, mine, options):
    factor = 3.0 if options and options["mine"] else 2.0
    before, x = model.layers[0].up, torch.ones(1, WIDE)
    wanted = nn.functional.linear(factor * x, factor * before.weight, before.bias)
    shared = quantize_model(model, mine, plugin_options=options)
    assert dict(shared.options.spec(mine).options) == {"factor": factor, "n": 1}
    assert model.layers[0].up(x).equal(wanted)


def test_the_options_of_the_caller_override_those_of_a_recipe(model, mine):
    types, options = {"fprop": mine}, {mine: {"factor": 4.0, "n": 5}}
    recipe = Recipe(name="own", summary="", source="", types=types, plugin_options=options)
    shared = quantize_model(model, recipe, plugin_options={mine: {"n": 6}})
    assert dict(shared.options.spec(mine).options) == {"factor": 4.0, "n": 6}
    assert recipe.plugin_options == options


@pytest.mark.parametrize(
    ("recipe", "options", "text"),
    [
        ("mine", {"nime": {"factor": 3.0}}, "'nime'; valid: mine"),
        ("mxfp8", {"mine": {"factor": 3.0}}, "'mine'; valid: none"),
        ("mxfp8", {"mxfp8": {"block": 16}}, "'mxfp8'; valid: none"),
        ("mine", {"mine": {"fcator": 3.0}}, "unknown option 'fcator' of mine; valid: factor"),
        ("mine", {"mine": {"factor": "3"}}, "factor = '3' of mine"),
        ("mine", {"mine": 3}, "plugin_options of mine are 3"),
    ],
)
def test_unknown_options_of_quantizers_are_refused(model, mine, recipe, options, text):
    with pytest.raises(ValueError, match=text):
        quantize_model(model, recipe, plugin_options=options)
    assert quantized(model) == set()


def test_a_wrong_file_is_refused(model, tmp_path):
    with pytest.raises(FileNotFoundError):
        quantize_model(model, str(tmp_path / "none.toml"))
    (tmp_path / "mine.toml").write_text('types = { fprop = "mxfp9" }')
    with pytest.raises(ValueError, match=r"mine\.toml: types\.fprop: .*'mxfp9'"):
        quantize_model(model, str(tmp_path / "mine.toml"))


def test_a_recipe_of_another_kind_is_refused(model, tmp_path):
    with pytest.raises(TypeError, match="QuantSpec; valid: Recipe"):
        quantize_model(model, QuantSpec("mxfp4"))
    path = tmp_path / "mine.toml"
    path.write_text('types = { fprop = "mxfp8" }')
    assert quantize_model(model, path).layers


def test_the_seed_of_the_caller_is_used(model, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('types = { fprop = "mxfp8" }\noptions = { seed = 5 }')
    assert quantize_model(copy.deepcopy(model), path).options.seed == 5
    assert quantize_model(model, path, seed=7).options.seed == 7


def test_weights_are_quantized_in_each_pass_unless_the_cache_is_wanted(model):
    twin = copy.deepcopy(model)
    quantize_model(model, "nvfp4")
    quantize_model(twin, "nvfp4", cache_weights=True)
    assert model(TOKENS).equal(twin(TOKENS))
    for either in (model, twin):
        for weight in either.parameters():
            weight.data.mul_(1.5)
    fresh = Model()
    fresh.load_state_dict(model.state_dict())
    quantize_model(fresh, "nvfp4")
    assert model(TOKENS).equal(fresh(TOKENS)) and not twin(TOKENS).equal(fresh(TOKENS))
    weights_changed()
    assert twin(TOKENS).equal(fresh(TOKENS))


def test_the_head_of_a_wrapped_model_stays_unquantized(model):
    wrapper = nn.ModuleDict({"model": model})
    assert "model.lm_head" not in quantize_model(wrapper, "nvfp4").layers


def test_a_layer_with_two_names_is_quantized_under_both_or_refused(model):
    model.layers[3] = model.layers[2]
    shared = quantize_model(copy.deepcopy(model), "mxfp4")
    assert "layers.2.up" in shared.layers and "layers.3.up" not in shared.layers
    with pytest.raises(ValueError, match=r"layers\.2\.up and layers\.3\.up are the same layer"):
        quantize_model(model, "mxfp4", exclude=["layers.3.*"])
    assert quantized(model) == set()


@pytest.mark.filterwarnings("ignore")
def test_an_encoder_of_torch_is_quantized_in_evaluation_too():
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(WIDE, 4, TALL, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    shared = quantize_model(encoder, "mxfp4", exclude=["*.self_attn.*"])
    with torch.no_grad():
        encoder(torch.randn(2, 8, WIDE))
    assert shared.idle_layers() == []


def test_a_weight_of_tensor_parallelism_is_refused(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    weight = distribute_tensor(torch.randn(WIDE, WIDE), mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"DTensor; valid: torch\.Tensor"):
        fake_quantize(weight, "mxfp4")


def test_two_lists_of_blocks_need_a_name(model):
    both = nn.ModuleDict({"encoder": model, "decoder": Model()})
    with pytest.raises(ValueError, match=r"encoder\.layers, decoder\.layers"):
        quantize_model(both, "nvfp4")
    quantize_model(both, "nvfp4", blocks="decoder.layers")
    assert "encoder.layers.7.up" in quantized(both)
    assert "decoder.layers.7.up" not in quantized(both)


def test_a_layer_that_another_function_multiplies_is_idle(model):
    shared = quantize_model(model, "mxfp4")
    model.lm_head.forward = lambda x: x @ model.lm_head.weight.t()
    model(TOKENS)
    assert shared.idle_layers() == ["lm_head"]


def test_a_tied_head_is_not_a_lookup(model):
    model.lm_head.weight = model.embedding.weight
    shared = quantize_model(model, "mxfp4")
    assert "lm_head" in shared.layers
    assert losses(model)[-1] < 5


@pytest.mark.slow
def test_a_model_of_transformers_trains():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        **{"hidden_size": WIDE, "intermediate_size": TALL, "num_hidden_layers": BLOCKS},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY},
    )
    model = transformers.LlamaForCausalLM(config)
    shared = quantize_model(model, "nvfp4")
    assert len(shared.layers) == 7 * (BLOCKS - 1)
    assert not isinstance(model.lm_head, QuantLinear)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    found = []
    for _ in range(4):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found[-1] < found[0]
    assert shared.idle_layers() == []


@pytest.mark.slow
def test_two_data_parallel_ranks_train_as_one_process(equal_on_two_ranks):
    equal_on_two_ranks("data_parallel_models.py")
