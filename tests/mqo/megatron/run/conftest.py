"""A run folder, as the environment of a training process names it."""

from argparse import Namespace

import pytest
import torch
from mqo.megatron.run import guard, observe, resumed_types
from mqo.quant import config
from mqo.quant.progress import PROGRESS
from mqo.quant.quantization import PROCESS
from mqo.quant.record import RECORDER
from mqo.quant.rounded import Rounded
from mqo.quant.spec import QuantSpec


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that starts a run that asks for the given types; its folder."""

    def start(exclude=(), include=(), record="every = 1", schedule="", rest="", **asked):
        rows = "".join(f'{site} = "{name}"\n' for site, name in asked.items())
        text = f"[asked]\n{rows}[layers]\nexclude = {list(exclude)}\n"
        text += f"include = {list(include)}\n"
        text += f"[schedule]\n{schedule}\n[record]\n{record}\n{rest}"
        (tmp_path / "quant.toml").write_text(text)
        monkeypatch.setenv(config.ENVIRONMENT_VARIABLE, str(tmp_path / "quant.toml"))
        config.reset()
        return tmp_path

    monkeypatch.setattr(resumed_types, "_loaded", Namespace())
    names = ("_checked", "_labeled", "_usage", "_args")
    begin = {**dict.fromkeys(names), "_calls": {}, "_began": False, "_steps": 0}
    for name, value in begin.items():
        monkeypatch.setattr(guard, name, value)
    monkeypatch.setattr(observe, "_writer", None)
    monkeypatch.setattr(PROGRESS, "step", PROGRESS.step)  # and put it back
    return start


@pytest.fixture
def other_rank(one_rank, monkeypatch):
    """A function that has another rank take part in collectives of objects.

    It is given a function of what this rank sends, which returns what the other one does.
    """
    real = torch.distributed.all_gather_object

    def answer(reply):
        def two_ranks(ranks, here):
            real(ranks, here)
            there = reply(here)
            if there is not None:
                ranks.append(there)

        monkeypatch.setattr(torch.distributed, "all_gather_object", two_ranks)

    return answer


@pytest.fixture
def quantized():
    """A function that runs both operands of a site once."""

    def quantize(site, quant_type, *operands, layer="layers.0"):
        x = torch.arange(32.0)
        PROCESS.begin_step(1)
        for operand in operands:
            RECORDER.observe(site, layer, operand, QuantSpec(quant_type), -1, x, Rounded(x + 0.5))
        RECORDER.end_step()

    return quantize
