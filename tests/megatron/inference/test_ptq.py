"""Calibration data, formats, quantizing, and a quantized checkpoint that loads again."""

import json

import pytest
import torch
from megatron.inference import ptq
from megatron.inference.checkpointing import checkpoint_folder, read_arguments
from megatron.training.checkpointing import load_checkpoint
from mqo.megatron.run.errors import PtqError
from mqo.megatron.run.modelopt import quantized_layers
from mqo.overlay.quant_types.sites import ATTENTION, LAYERS

from .conftest import VOCABULARY

WIDE = ("--hidden-size", "128", "--ffn-hidden-size", "256")


def test_texts_of_json_lines_and_of_paragraphs(tmp_path):
    lines, plain = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines.write_text("\n".join(json.dumps({"text": t}) for t in ("one", "two")) + "\n\n")
    plain.write_text("one\n\ntwo\nlines\n\n\n")
    assert list(ptq.read_texts(lines)) == ["one", "two"]
    assert list(ptq.read_texts(plain)) == ["one", "two\nlines", "\n"][:2]
    lines.write_text('{"text": "one"}\n{"title": "two"}\n')
    with pytest.raises(PtqError, match=r'Line 2 of .*a\.jsonl.*\{"text": '):
        list(ptq.read_texts(lines))
    with pytest.raises(PtqError, match=r"none\.jsonl"):
        list(ptq.read_texts(tmp_path / "none.jsonl"))


def test_samples_have_no_padding_and_too_few_are_refused():
    def encode(text):
        return [int(c) for c in text]

    sizes = {"samples": 2, "length": 3, "vocabulary": 10}
    found = ptq.calibration_samples(["12", "345", "67"], encode, **sizes)
    assert found.tolist() == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(PtqError, match=r"5 tokens, 1 samples of 3.*--calib-size"):
        ptq.calibration_samples(["12", "345"], encode, **sizes)
    with pytest.raises(PtqError, match=r"token 6.*5.*--tokenizer-model"):
        ptq.calibration_samples(["123456"], encode, **sizes | {"vocabulary": 5})


def test_formats_that_do_not_run_say_why():
    assert ptq.format_of("fp8").config == "FP8_DEFAULT_CFG"
    with pytest.raises(PtqError, match=r"format nvfp4 .*CUDA\. Expected: .*int8, int8_sq"):
        ptq.format_of("nvfp4")
    with pytest.raises(PtqError, match=r"format int3\. Expected: .*int8, int8_sq"):
        ptq.format_of("int3")


def test_a_model_that_blocks_do_not_fit_is_refused_before_anything_changes(make):
    model = make()
    with pytest.raises(PtqError, match=r"blocks of 128: .*linear_proj \[64, 64\]"):
        ptq.quantize(model, "int4_awq", [])
    assert not any("quantizer" in name for name, _ in model.named_modules())


def test_sites_in_the_source_that_quantize_are_refused(tmp_path):
    assert [f"megatron/core/{name}" for name in ptq.SITE_FILES] == [LAYERS, ATTENTION]
    for name in ptq.SITE_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        site = "custom_quant_type = 'none'\nq = bind('fprop', custom_quant_type)\n"
        (tmp_path / name).write_text(site)
    ptq.check_source(tmp_path)
    path = tmp_path / ptq.SITE_FILES[0]
    path.write_text(path.read_text().replace("none", "mxfp8"))
    with pytest.raises(PtqError, match="fprop = mxfp8"):
        ptq.check_source(tmp_path)


def test_generation_takes_the_likeliest_token_and_stops_at_the_end(make):
    model = make().eval()
    made = ptq.generate(model, [1, 2, 3], 4, None)
    assert len(made) == 4
    last = ptq.logits(model, torch.tensor([[1, 2, 3, *made[:-1]]]))[0, -1]
    assert made[-1] == last.argmax()
    assert ptq.generate(model, [1, 2, 3], 4, made[0]) == made[:1]


def test_a_quantized_checkpoint_loads_again_with_its_quantizers(make, tokens, tmp_path):
    model = ptq.quantize(make(*WIDE), "int8_sq", [tokens[0][0]])
    expected = ptq.logits(model, tokens[0][0])
    assert not any(
        hasattr(m, "weight_quantizer") and m.weight_quantizer.is_enabled
        for n, m in model.named_modules()
        if n.endswith("output_layer")
    )
    ptq.save(model, tmp_path, "int8_sq", {"split": "90,5,5", "data_path": None, "hidden_size": 1})
    assert (checkpoint_folder(tmp_path) / "modelopt_state").is_dir()
    assert checkpoint_folder(tmp_path).name == "iter_0000001"
    kept = read_arguments(tmp_path)
    assert kept["split"] == "90,5,5"  # the text of the training, and nothing else of it
    assert kept["hidden_size"] == model.config.hidden_size
    with pytest.raises(PtqError) as refused:
        ptq.check_not_quantized(tmp_path)
    assert refused.value.facts["found"] == f"The checkpoint in {tmp_path} is already quantized"
    other = make(*WIDE, "--load", tmp_path, "--finetune", seed=9)
    load_checkpoint([other.eval()], None, None, strict=True)
    assert quantized_layers([other]) == quantized_layers([model]) != []
    assert torch.equal(ptq.logits(other, tokens[0][0]), expected)


def test_a_plain_checkpoint_is_not_quantized_already(make, save, tmp_path):
    ptq.check_not_quantized(save(make(), tmp_path))


def test_an_expert_without_calibration_data_is_named(make, tokens):
    model = ptq.quantize(make(*WIDE), "int8", [tokens[0][0] % VOCABULARY])
    quantizer = model.decoder.layers[0].mlp.linear_fc1.input_quantizer
    quantizer.amax.fill_(float("nan"))
    with pytest.raises(PtqError, match=r"1 quantizers .*linear_fc1.*--calib-size"):
        ptq._check_calibrated(model)
