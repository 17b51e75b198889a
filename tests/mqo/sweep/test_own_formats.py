"""A sweep of a user's format next to the formats of mqo."""

import pytest
from mqo.errors import FormatError
from mqo.launch.config import RunConfig
from mqo.launch.own_types import OwnTypes
from mqo.sweep import configs

from ..own_format import FILE


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(FILE, encoding="utf-8")
    return OwnTypes.from_options([file])


def jobs(own, modes, **rest):
    return configs.jobs("llama32-1b", "wikipedia", modes, "tiny", own=own, **rest)


def test_a_format_is_swept_next_to_nvfp4(own):
    planned = jobs(own, "bf16,linear_nvfp4,linear_own7", seeds=(1, 2))
    configs.check(planned)
    with_format = [job for job in planned if job.config.quantization.formats]
    assert [job.name.removeprefix("llama32-1b_wikipedia_") for job in with_format] == [
        "linear_own7_seed1",
        "linear_own7_seed2",
    ]
    version = own.rows["own7"].version
    assert {job.label for job in with_format} == {f"{job.name} {version}" for job in with_format}
    for job in planned:
        assert RunConfig.model_validate_json(job.config.model_dump_json()) == job.config


def test_globs_match_its_modes_only_by_its_name(own):
    assert any("linear_own7" in job.name for job in jobs(own, "*_own7"))
    with pytest.raises(FormatError, match="own7"):
        jobs(own, "linear_*")
