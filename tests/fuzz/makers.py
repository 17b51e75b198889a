"""Make the undamaged folders, and for each case a damaged copy and the command that reads it."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..mqo.damage import damage_one as damage_lightly
from ..real_runs import TINY
from . import damages
from .limited import PROJECT, Ending, run

TRAIN = (str(PROJECT.root / "script/train_config.py"), "--model", "llama32-1b", "--dataset")
TRAIN += ("wikipedia", "--quantization", "linear_mxfp8", "--training-config", "tiny")
FLAGS = ("--", *TINY, "--micro-batch-size", "4")
PTQ = str(PROJECT.tree / "examples/export/ptq_and_trtllm_export/text_generation_ptq.py")
MQO = "mqo"
CALIBRATE = ("--export-quant-cfg", "fp8", "--calib-size", "4", "--calib-length", "32")
# {group: {command: its words, with {model} (damaged), {sound}, {out} and {text} replaced}}
COMMANDS: dict[str, dict[str, tuple[str, ...]]] = {
    "payloads": {
        "eval": (MQO, "eval", "{model}", "--tokens", "64"),
        "generate": (MQO, "generate", "{model}", "--prompt", "The", "--tokens", "2"),
        "megatron-to-hf": (MQO, "convert", "megatron-to-hf", "{model}", "{out}"),
        "hf-to-megatron": (MQO, "convert", "hf-to-megatron", "{model}", "{out}"),
        "export": (MQO, "export", "{model}", "{out}", "--format", "mxfp8"),
        "ptq": (PTQ, "--load", "{model}", "--save", "{out}", *CALIBRATE),
        "resume": (*TRAIN, "{model}", *FLAGS),
        "teacher": (*TRAIN, "--teacher", "{model}", *FLAGS),
    },
    "runs": {
        "report": (MQO, "report", "{sound}", "{model}", "-o", "{out}"),
        "plot": (MQO, "plot", "{model}", "-o", "{out}.png"),
        "operands": (MQO, "plot", "{model}", "--operands", "-o", "{out}.png"),
        "compare": (MQO, "perf", "--compare", "{sound}", "{model}"),
        "rerun": (MQO, "rerun", "{model}", "--allow-versions"),
        "track": (MQO, "track", "{model}", "--tracker", "mlflow"),
        "eval run": (MQO, "eval", "{model}", "--tokens", "64"),
    },
    "hf": {
        "hf-to-megatron": (MQO, "convert", "hf-to-megatron", "{model}", "{out}"),
        "export": (MQO, "export", "{model}", "{out}", "--format", "mxfp8"),
    },
    "tokenizers": {
        "prepare": (
            *(MQO, "data", "prepare", "jsonl", "--input", "{text}", "--workers", "1"),
            *("--tokenizer", "{model}", "--output", "{out}"),
        ),
        "megatron-to-hf": (
            *(MQO, "convert", "megatron-to-hf", "{sound}", "{out}", "--tokenizer", "{model}"),
        ),
        "generate": (
            *(MQO, "generate", "{sound}", "--prompt", "The", "--tokens", "2"),
            *("--tokenizer", "{model}"),
        ),
        "ptq": (
            *(PTQ, "--load", "{sound}", "--save", "{out}", "--tokenizer-model", "{model}"),
            *CALIBRATE,
        ),
    },
}
PACKAGES = ("mlflow", "modelopt")  # what commands of these cases import
# Programs that load a model take seconds: a case in N is theirs.
WEIGHTS = {"ptq": 1, "teacher": 1, "resume": 1, "eval run": 1, "megatron-to-hf": 2, "generate": 2}
COUNTS = {"payloads": 200, "runs": 200, "hf": 100, "tokenizers": 100}
PATTERNS = (r"(a+)+$", r"(\w+\s?)+$", r"(([a-z])+.)+[A-Z]([a-z])+$", "(", "a{99999}")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Case:
    """A damaged folder, the command that reads it, and what is known of the outcome.

    `must_refuse`: an exit code of 0 is wrong. `same_output`: it must print what the undamaged
    folder prints, or refuse.
    """

    command: str
    words: list[str]
    damage: str
    marker: Path
    out: Path
    must_refuse: bool
    same_output: bool


class Sound:
    """The undamaged folders below `root`: checkpoints, a run, Hugging Face's files, a text."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoint, self.run = root / "checkpoint", root / "run"
        self.hf, self.tokenizer, self.text = root / "hf", root / "tokenizer", root / "text.jsonl"

    def make(self) -> None:
        """Train, convert and copy, if that is not done."""
        if self.text.exists():
            return
        self.root.mkdir(parents=True, exist_ok=True)
        _succeed([*TRAIN, str(self.checkpoint), *FLAGS], self.root)
        _succeed([MQO, "convert", "megatron-to-hf", str(self.checkpoint), str(self.hf)], self.root)
        (self.checkpoint / "finished.json").unlink()  # so that the training starts again
        (made,) = (self.root / "runs").glob("*_linear_mxfp8_*")
        shutil.copytree(made, self.run, ignore=shutil.ignore_patterns("source"))
        (self.run / "source").mkdir()
        shutil.copytree(self.checkpoint, self.run / "checkpoints")
        self.tokenizer.mkdir()
        for name in TOKENIZER_FILES:
            shutil.copy(self.hf / name, self.tokenizer)
        self.text.write_text('{"text": "The city lies on the river."}\n' * 20)

    @cached_property
    def outputs(self) -> dict[str, str]:
        """{command: what it prints of the undamaged checkpoint}."""
        return {name: self._output(name) for name in ("eval", "generate")}

    def _output(self, name: str) -> str:
        words = COMMANDS["payloads"][name]
        found = [
            word.format(model=self.root / "model", sound="", out="", text="") for word in words
        ]
        shutil.copytree(self.checkpoint, self.root / "model")
        try:
            return _succeed(found, self.root).out
        finally:
            shutil.rmtree(self.root / "model")


def _succeed(words: list[str], folder: Path) -> Ending:
    ended = run(words, folder)
    if ended.code:
        raise SystemExit(f"{words[:4]} of undamaged files ended with {ended.code}: {ended.err}")
    return ended


def make(group: str, seed: int, number: int, folder: Path, sound: Sound) -> Case:
    """Make the folder of case (seed, number) of a group."""
    draw = random.Random(f"{seed}/{group}/{number}")
    commands = COMMANDS[group]
    (name,) = draw.choices(list(commands), [WEIGHTS.get(one, 3) for one in commands])
    folder.mkdir(parents=True)
    marker, model = folder / "ran", folder / "model"
    of_checkpoint = group == "payloads" and name != "hf-to-megatron"
    origin, change = {
        "payloads": (sound.checkpoint, _checkpoint) if of_checkpoint else (sound.hf, _hf_pickle),
        "runs": (sound.run, _run),
        "hf": (sound.hf, _hf),
        "tokenizers": (sound.tokenizer, _tokenizer),
    }[group]
    shutil.copytree(origin, model)
    damage, must_refuse = change(draw, model, sound, marker)
    same = name in ("eval", "generate") and damage.endswith("not sealed")
    texts = {"model": model, "out": folder / "out", "text": sound.text}
    texts["sound"] = sound.run if group == "runs" else sound.checkpoint
    words = [word.format(**texts) for word in commands[name]]
    return Case(name, words, damage, marker, folder / "out", must_refuse, same)


Change = Callable[[random.Random, Path, Sound, Path], tuple[str, bool]]


def _checkpoint(draw: random.Random, model: Path, sound: Sound, marker: Path) -> tuple[str, bool]:
    return torch_process().ask("damage", draw, model, sound.checkpoint, marker)


def _hf_pickle(draw: random.Random, model: Path, sound: Sound, marker: Path) -> tuple[str, bool]:
    return torch_process().ask("weights_of_hf", draw, model, marker), False


def _run(draw: random.Random, model: Path, sound: Sound, marker: Path) -> tuple[str, bool]:
    """Damage one to three files of a run; its program would make the marker."""
    (model / "source/pretrain_gpt.py").write_text(f"open({str(marker)!r}, 'w')\n")
    done = []
    for number in range(draw.choice((1, 1, 2, 3))):
        if number == 0 and draw.random() < 0.3:
            done.append(f"lightly {damage_lightly(draw, model).name}")
        elif draw.random() < 0.2:
            path = model / draw.choice(("command.sh", "cell.json", "quant.toml"))
            if damages.is_small(path):
                text = f"; touch '{marker}'; /".encode()
                path.write_bytes(path.read_bytes().replace(b"/", text, 3))
                done.append(f"commands in {path.name}")
        else:
            names = ("*.json", "*.jsonl", "*.toml", "*.txt", "*.sh", "*.diff", "events*")
            done.append(damages.damage_one(draw, model, names))
    return ", ".join(done), False


def _hf(draw: random.Random, model: Path, sound: Sound, marker: Path) -> tuple[str, bool]:
    """Damage one or two files of a Hugging Face folder, or name code in its configuration."""
    done = []
    for number in range(draw.choice((1, 1, 2))):
        if number == 0 and draw.random() < 0.2:
            done.append(_code(draw, model / "config.json", marker))
        elif draw.random() < 0.5:
            done.append(damages.damage_one(draw, model, ("config.json",)))
        else:
            done.append(damages.damage_one(draw, model))
    return ", ".join(done), False


def _tokenizer(draw: random.Random, model: Path, sound: Sound, marker: Path) -> tuple[str, bool]:
    """Damage a tokenizer, name code in its configuration, or give it a pattern or a template."""
    kind = draw.choice(("file", "file", "file", "code", "pattern", "more"))
    if kind == "file":
        return damages.damage_one(draw, model), False
    if kind == "code":
        return _code(draw, model / "tokenizer_config.json", marker), False
    if kind == "more":
        names = ("special_tokens_map.json", "added_tokens.json", "merges.txt", "vocab.json")
        path = model / draw.choice((*names, "chat_template.jinja", "tokenizer.model"))
        path.write_text(json.dumps({"a": 1, "b": {"c": [2]}}))
        return damages.damage_file(draw, path), False
    path = model / "tokenizer.json"
    table = json.loads(path.read_text())
    pattern = draw.choice(PATTERNS)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    path.write_text(json.dumps(table | {"pre_tokenizer": split | {"invert": False}}))
    return f"pattern {pattern}", False


def _code(draw: random.Random, path: Path, marker: Path) -> str:
    """Name classes of a file next to a configuration."""
    (path.parent / "code.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: ...\n")
    table = json.loads(path.read_text())
    table["auto_map"] = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Config", None]}
    kinds = ({"model_type": "foreign"}, {"tokenizer_class": "Foreign"}, {})
    path.write_text(json.dumps(table | draw.choice(kinds)))
    return f"code in {path.name}"


class TorchProcess:
    """A process that has imported torch, which this one must not: its forks are commands."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.here, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there,), daemon=True)
        self.process.start()

    def ask(self, name: str, draw: random.Random, *words: Path) -> object:
        """Return what a function of `checkpoints.py` returns; advance `draw`."""
        self.here.send((name, draw, words))
        answer, state = self.here.recv()
        if isinstance(answer, Exception):
            raise answer
        draw.setstate(state)
        return answer


_torch: list[TorchProcess] = []


def torch_process() -> TorchProcess:
    """Return the process, started once."""
    if not _torch:
        _torch.append(TorchProcess())
    return _torch[0]


def _serve(connection: multiprocessing.connection.Connection) -> None:
    sys.path.insert(0, str(PROJECT.tree))
    from . import checkpoints

    while True:
        try:
            name, draw, words = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(checkpoints, name)(draw, *words)
        except Exception as error:
            answer = RuntimeError(f"{name}: {type(error).__name__}: {error}")
        connection.send((answer, draw.getstate()))
