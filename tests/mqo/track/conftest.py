"""A run folder in miniature, and what trackers' own stores say of it when they are read back."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from mqo.launch.config import resolve
from mqo.runs import RunFolder

# A name twice at an iteration, as a final validation has it; values that JSON has no form for.
ROWS = [
    (1, "lm loss", 8.373268127441406),
    (1, "quant/fprop/decoder.layers.0.mlp.linear_fc1/x/sqnr_db", 30.5),
    (2, "lm loss", "nan"),
    (2, "grad-norm", "inf"),
    (2, "lm loss validation", 7.5),
    (2, "lm loss validation", 7.25),
]
HISTOGRAM = {"iteration": 2, "name": "quant/fprop/x/scale_exponent", "histogram": {"-1": 3}}
INPUTS = ("quant.toml", "overlay.diff", "environment.json", "command.sh", "coverage.txt")
PICTURE = bytes.fromhex("89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de") + (
    bytes.fromhex("0000000c49444154789c63f8cfc000000301010018dd8db00000000049454e44ae426082")
)


def make_run(root, rows=ROWS, *, result=True, **rest):
    """A run as `mqo` and the training leave it; one without a result has failed."""
    run = RunFolder(root)
    (run.source / "megatron" / "__pycache__").mkdir(parents=True)
    (run.source / "megatron" / "layers.py").write_text("custom_quant_type = 'mxfp8'\n")
    (run.source / "megatron" / "__pycache__" / "layers.pyc").write_bytes(b"bytecode")
    resolve("llama32-1b", "wikipedia", "FA_linear_mxfp8", "tiny", **rest).write(run)
    for name in INPUTS:
        (root / name).write_text(f"# {name} of {root.name}\n")
    run.log.write_text("not for trackers")
    add_rows(run, rows)
    if result:
        run.result.write_text(json.dumps({"valid_loss": 7.25}))
    else:
        run.failure.write_text("GuardError: qk never ran\n")
    return run


def add_rows(run, rows):
    with run.metrics.open("a") as lines:
        for iteration, name, value in rows:
            row = {"iteration": iteration, "name": name, "value": value}
            lines.write(json.dumps(row) + "\n")
        lines.write(json.dumps(HISTOGRAM) + "\n")


def draw(run, folder):
    """A picture for trackers."""
    (folder / "loss.png").write_bytes(PICTURE)
    return [folder / "loss.png"]


@dataclass
class Stored:
    """A run as a tracker has it: metrics as RunFolder.read_metrics, files by name."""

    name: str
    group: str | None
    parameters: dict
    metrics: dict
    files: dict
    pictures: list
    status: str


class MlflowStore:
    """A folder of MLflow, read by its own client."""

    name = "mlflow"

    def __init__(self, root):
        self.root = root / "ml runs"
        self.variables = {"MLFLOW_TRACKING_URI": self.root.as_uri()}
        self.variables |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}

    def runs(self):
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self.root.as_uri())
        (experiment,) = (e for e in client.search_experiments() if e.name == "mqo")
        found = client.search_runs([experiment.experiment_id])
        return [self._stored(client, one) for one in found]

    def _stored(self, client, one):
        id, folder = one.info.run_id, self.root / one.info.experiment_id / one.info.run_id
        metrics = {}
        for name in one.data.metrics:
            history = client.get_metric_history(id, name)
            metrics[name] = [(metric.step, metric.value) for metric in history]
        parts = {part.name: sorted(part.iterdir()) for part in (folder / "artifacts").iterdir()}
        files = {
            p.name: p.read_bytes() for kind in ("inputs", "results") for p in parts.get(kind, ())
        }
        pictures = [path.read_bytes() for path in parts.get("pictures", ())]
        group, status = one.data.tags.get("group"), one.info.status.lower()
        return Stored(one.info.run_name, group, one.data.params, metrics, files, pictures, status)


class WandbStore:
    """Offline runs of Weights & Biases, which lie in the run folders; read record by record."""

    name = "wandb"

    def __init__(self, root):
        self.root = root
        self.variables = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        self.variables |= {"WANDB_ERROR_REPORTING": "false"}
        for kind in ("DATA", "CACHE", "CONFIG"):
            self.variables[f"WANDB_{kind}_DIR"] = str(root / "wandb data" / kind.lower())

    def runs(self):
        return [self._stored(file) for file in sorted(self.root.rglob("*.wandb"))]

    def _stored(self, file):
        found = Stored("", None, {}, {}, {}, [], "running")
        for record in wandb_records(file):
            match record.WhichOneof("record_type"):
                case "run":
                    found.name, found.group = record.run.display_name, record.run.run_group or None
                    updates = {u.key: json.loads(u.value_json) for u in record.run.config.update}
                    found.parameters |= {k: v for k, v in updates.items() if k != "_wandb"}
                case "history":
                    self._add(found, file, record.history.item)
                case "artifact":
                    for entry in record.artifact.manifest.contents:
                        found.files[entry.path] = Path(entry.local_path).read_bytes()
                case "exit":
                    found.status = "failed" if record.exit.exit_code else "finished"
        return found

    def _add(self, found, file, items):
        values = {"/".join(i.nested_key): json.loads(i.value_json) for i in items}
        for name, value in values.items():
            if name.startswith("pictures/"):
                if name.endswith("/path"):
                    found.pictures.append((file.parent / "files" / value).read_bytes())
            elif not name.startswith("_") and name != "iteration":
                found.metrics.setdefault(name, []).append((values["iteration"], float(value)))


def wandb_records(file):
    """The records of a .wandb file: LevelDB's log format, behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:  # no record begins in the last bytes of a block
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(part)
            part = b""


@pytest.fixture(params=[MlflowStore, WandbStore], ids=lambda kind: kind.name)
def store(request, tmp_path, monkeypatch):
    """Each tracker's store, empty, offline."""
    return opened(request.param(tmp_path), monkeypatch)


@pytest.fixture
def mlflow_store(tmp_path, monkeypatch):
    """MLflow's store, where one tracker stands for both."""
    return opened(MlflowStore(tmp_path), monkeypatch)


def opened(store, monkeypatch):
    """The store, which what is tracked from now on goes to; skips without its package."""
    pytest.importorskip(store.name, reason="the extra `trackers` is not installed")
    for name, value in store.variables.items():
        monkeypatch.setenv(name, value)
    return store


def mqo_track(*words, **variables):
    """`mqo track` as a process of its own, with no more variables than it needs."""
    command = [sys.executable, "-m", "mqo", "track", *map(str, words)]
    return subprocess.run(command, env=variables, capture_output=True, text=True)
