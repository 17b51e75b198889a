"""Detect that a command's training has finished: by the tracker, and by a record in CHECKPOINT.

The record is written after result.json, so that a run that was killed before or during its final
validation validates when its command is started again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mqo.errors import MqoError, RunError
from mqo.launch.checkpoints import newest
from mqo.launch.command import flag_words, read_flags
from mqo.launch.config import Experiment, RunConfig
from mqo.launch.flags import length
from mqo.launch.start_weights import FLAG as START
from mqo.megatron.run.files import iteration_folder
from mqo.run_records import parsed
from mqo.runs import RunFolder, replace_text
from mqo.untrusted import UntrustedFileError, sha256_of

FILE, MANIFEST = "finished.json", "integrity.json"
# Megatron's flags that set which checkpoint a run starts from, and whether it counts steps from 0.
_START = {"load": str, "ckpt-step": int, "finetune": False, "skip-train": False}


class FinishRecord(BaseModel):
    """The content of finished.json: the validated checkpoint, its run, and the run's settings.

    Its iteration and the SHA-256 of its integrity.json identify the checkpoint. `settings`
    determine the weights and what a validation measures.
    """

    iteration: int
    manifest: str
    run: Path
    settings: dict[str, Any]


class _Manifest(BaseModel):
    """The content of integrity.json: the SHA-256 of each file."""

    files: dict[str, str]


@dataclass(frozen=True)
class Finished:
    """A training that has nothing left to do, at `step` of `steps`."""

    step: int
    steps: int
    checkpoint: Path
    run: Path | None = None

    def line(self) -> str:
        """Return the one line that is printed."""
        text = f"already trained: step {self.step} of {self.steps}; checkpoint {self.checkpoint}"
        return f"{text}; run {self.run}" if self.run else text


def finished(config: RunConfig) -> Finished | None:
    """Return the finished training of the command of `config`; None if it is not finished.

    It is finished if there is an intact checkpoint of the last step with a record of its
    validation, or an intact checkpoint of a later step, which this command would not validate. A
    damaged checkpoint does not count: the run resumes from an older one.

    Raises:
        RunError: the last step was trained by a command with other settings.
    """
    folder, step = started_from(config.experiment)
    steps = length(config.experiment).steps
    if folder is None or step is None or step < steps:
        return None
    path = iteration_folder(folder, str(step))
    record = _read_record(folder, step, _sha256(path / MANIFEST))
    if (record is None and step == steps) or not _is_whole(path):
        return None
    if record is not None:
        _check_settings(folder, record, config)
    return Finished(step, steps, path, record.run if record else None)


def started_from(experiment: Experiment) -> tuple[Path | None, int | None]:
    """Return the folder and the iteration of the checkpoint that the run continues.

    The iteration is None without a checkpoint, for a release checkpoint, or if the run counts its
    steps from 0.
    """
    flags = read_flags(experiment.extra_flags, _START)
    folder = Path(flags.load) if flags.load else experiment.checkpoint
    if folder is None or flags.finetune or flags.skip_train:
        return folder, None
    step = newest(folder) if flags.ckpt_step is None else str(flags.ckpt_step)
    return folder, int(step) if step and step.isdecimal() else None


def note_finished(folder: RunFolder, config: RunConfig, command: list[str]) -> None:
    """Write the record of a finished run into the folder that it saved in.

    Only the last of several nodes has a result. A run that stopped early, as with --exit-interval,
    has no final validation and gets no record.
    """
    where, save = config.placement.cluster, flag_words(command).get("--save")
    if not folder.ended.exists() or not save or where.node_rank < where.nnodes - 1:
        return
    saved = Path(save[0])
    step = newest(saved) or ""
    manifest = _sha256(iteration_folder(saved, step) / MANIFEST)
    if step.isdecimal() and manifest is not None:
        record = FinishRecord(
            iteration=int(step),
            manifest=manifest,
            run=folder.root.resolve(),
            settings=_settings(config),
        )
        with suppress(OSError, MqoError):  # without the record the command validates again
            replace_text(saved / FILE, record.model_dump_json(indent=1))


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that two commands of the same training share."""
    names = {"dtype", "teacher", "distillation_config"}
    settings = config.experiment.model_dump(mode="json", include=names)
    settings |= {"model": config.experiment.model.name, "dataset": config.experiment.dataset.name}
    text, flags = config.experiment.text, flag_words(config.experiment.extra_flags)
    settings["text"] = text and [*text.files.values(), text.tokenizer]
    settings["sizes"] = config.experiment.model.model_dump(mode="json")
    settings["start"] = flags.get(START)
    quant = config.quantization
    settings |= quant.model_dump(mode="json", exclude={"formats"})
    if quant.types is None:  # the tree decides which formats the run uses
        return settings
    return settings | {"formats": {name: row.digest for name, row in quant.formats.items()}}


def _check_settings(folder: Path, record: FinishRecord, config: RunConfig) -> None:
    now = _settings(config)
    changed = [
        f"{name} was {was} and is {now.get(name)}" if isinstance(was, str) else name
        for name, was in record.settings.items()
        if _given(was) != _given(now.get(name))
    ]
    if changed:
        raise RunError(
            f"{folder} holds a finished training with other settings: {', '.join(changed)}",
            expected=f"the settings of that training, {record.run}",
            help="To train with these settings, give the run another CHECKPOINT",
        )


def _given(setting: Any) -> Any:
    """Return a setting without sizes that are None, which an older record does not have."""
    if not isinstance(setting, dict):
        return setting
    return {name: value for name, value in setting.items() if value is not None}


def _read_record(folder: Path, step: int, manifest: str | None) -> FinishRecord | None:
    """Return the record in a folder; None if it is damaged or is about another checkpoint."""
    try:
        record = parsed(folder / FILE, FinishRecord) if (folder / FILE).is_file() else None
    except RunError:
        return None
    if record is None or (record.iteration, record.manifest) != (step, manifest):
        return None
    return record


def _is_whole(path: Path) -> bool:
    """Return whether the files of a checkpoint match the hashes that were saved with them."""
    try:
        files = parsed(path / MANIFEST, _Manifest).files if (path / MANIFEST).is_file() else {}
        return bool(files) and all(_sha256(path / name) == was for name, was in files.items())
    except RunError:
        return False


def _sha256(path: Path) -> str | None:
    """Return the hash of a file; None if it cannot be read."""
    try:
        return sha256_of(path)
    except UntrustedFileError:
        return None
