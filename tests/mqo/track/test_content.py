"""What of a run folder trackers get."""

import json
import os
import tarfile

import pytest
from mqo.errors import RunError
from mqo.runs import SWEEP, MetricsTail
from mqo.track import content

from ..odd_files import ODD
from .conftest import INPUTS, make_run


def test_parameters_are_the_configuration_by_path(tmp_path):
    run = make_run(tmp_path / "one", extra_flags=("--seed", "7"))
    assert content.group_of(run) is None
    found = content.parameters(run)
    assert found["experiment.model.name"] == "llama32-1b"
    assert found["quantization.types.qk"] == "mxfp8"
    assert found["experiment.extra_flags"] == '["--seed", "7"]'
    assert found["experiment.dataset.sample"] is True
    assert "experiment.teacher" not in found  # it is null there


def test_a_changed_model_has_a_name_of_its_own(tmp_path):
    run = make_run(tmp_path / "one", extra_flags=("--num-layers", "3"))
    assert content.parameters(run)["experiment.name"] == "llama32-1b*"


def test_the_group_is_the_sweep(tmp_path):
    run = make_run(tmp_path / "a sweep" / "one")
    (tmp_path / "a sweep" / SWEEP).write_text("{}")
    assert content.group_of(run) == "a sweep"


def test_files_are_those_that_are_there_and_never_the_log(tmp_path):
    run = make_run(tmp_path / "one", result=False)
    inputs = [path.name for path in content.inputs(run, tmp_path)]
    assert sorted(inputs) == sorted([*INPUTS, "source.tar.gz"])
    assert [path.name for path in content.results(run)] == ["failure.txt"]
    assert content.status_of(run) == "failed"


def test_the_archive_depends_on_the_source_alone(tmp_path):
    one, other = (make_run(tmp_path / name) for name in ("one", "other"))
    (other.source / "megatron" / "__pycache__" / "more.pyc").write_bytes(b"more")
    first, second = (
        content.pack(run.source, tmp_path / f"{run.root.name}.tar.gz") for run in (one, other)
    )
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as tar:
        assert tar.getnames() == ["source/megatron/layers.py"]
    (other.source / "megatron" / "layers.py").write_text("custom_quant_type = 'mxfp4'\n")
    assert content.pack(other.source, tmp_path / "third").read_bytes() != first.read_bytes()


def test_values_are_numbers_alone(tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = [{"name": "a", "value": "inf"}, {"name": "a", "histogram": {}}]
    file.write_text("".join(json.dumps({"iteration": 3} | row) + "\n" for row in rows))
    assert list(content.values(MetricsTail(file).rows())) == [(3, "a", float("inf"))]


def huge(path):
    path.touch()
    os.truncate(path, 1 << 40)


def link_outside(path):
    secret = path.parent.with_name("secret")
    secret.write_text("secret")
    path.symlink_to(secret)


SENT = ("quant_config", "overlay_diff", "environment", "command", "coverage", "coverage_table")
LEFT = ("result", "failure", "quant_stats", "implementation", "device")


@pytest.mark.parametrize("make", [*ODD, link_outside, huge, None])
@pytest.mark.parametrize("name", [*SENT, *LEFT])
def test_only_regular_files_of_the_run_are_sent(tmp_path, name, make):
    run = make_run(tmp_path / "one")
    path = getattr(run, name)
    path.unlink(missing_ok=True)
    if make is None:
        assert path not in (*content.inputs(run, tmp_path), *content.results(run))
        return
    make(path)
    with pytest.raises(RunError, match=path.name):
        content.inputs(run, tmp_path) if name in SENT else content.results(run)


def test_a_huge_file_of_the_source_is_not_packed(tmp_path):
    run = make_run(tmp_path / "one")
    huge(run.source / "pretrain_gpt.py")
    with pytest.raises(RunError, match="pretrain_gpt"):
        content.pack(run.source, tmp_path / "archive")
