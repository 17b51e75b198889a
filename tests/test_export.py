"""`mqo export` of a real run: what it packs is what the model multiplied with in training."""

import subprocess
import sys

import pytest
from mqo.launch import convert, evaluation
from mqo.launch.export import export
from mqo.launch.forward_pass import AS_TRAINED, SavedModel

pytest.importorskip("modelopt")
pytest.importorskip("transformers")
from .real_runs import TINY, Starter
from .vendored_tree import PROJECT

pytestmark = pytest.mark.slow

# Weights alone are quantized, so that a model with rounded weights computes the same unquantized.
# The first of two blocks is left out.
RECIPE = """
types = { fprop = "mixed" }
[operands]
"fprop.x" = { quant_type = "none" }
"fprop.weight" = { quant_type = "nvfp4", tile = "square" }
[[rules]]
first = 1
quant_type = "none"
"""


@pytest.fixture(scope="module")
def run(checkout_with, tmp_path_factory):
    """A short run in fp32 of the recipe, on the wikipedia sample."""
    folder = tmp_path_factory.mktemp("a recipe")
    recipe = folder / "weights.toml"
    recipe.write_text(RECIPE)
    start = Starter(checkout_with(runs=folder / "runs"))
    return start("bf16", recipe=str(recipe), flags=TINY, allow_mostly_unquantized=True)


def loss(tree, checkpoint, mode, file):
    words = evaluation.text(file=file, tokenizer=PROJECT.data / "wikipedia/tokenizer")
    (found,) = evaluation.evaluate(tree, [SavedModel.find(checkpoint)], [mode], words)
    return found.loss


def test_packed_weights_have_the_loss_of_the_quantized_run(vendored, run, tmp_path):
    packed, full, back = (tmp_path / name for name in ("packed", "in full", "back"))
    text = tmp_path / "a text.txt"
    text.write_text("The miller grinds the barley at dawn. " * 40)
    made = export(vendored.root, run.root, packed, layout="mqo")
    assert made.types == {"nvfp4": 7}
    page = (packed / "README.md").read_text()
    assert page.count("# packed\n") == 1
    assert "packed here: 7 weight matrices in nvfp4" in page and "| training loss |" in page
    reader = [sys.executable, packed / "dequantize.py", packed, full]
    subprocess.run(reader, check=True, capture_output=True)
    convert.hf_to_megatron(vendored.root, full, back)
    trained = loss(vendored, run.root, AS_TRAINED, text)
    unquantized = loss(vendored, run.root, "bf16", text)
    # The same products, in fp32, by a layer that is not ours.
    assert loss(vendored, back, "bf16", text) == pytest.approx(trained, rel=1e-8)
    assert unquantized != pytest.approx(trained, rel=1e-6)
