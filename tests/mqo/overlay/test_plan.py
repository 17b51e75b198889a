import pytest
from mqo.errors import DriftError
from mqo.overlay.plan import plan

from ..conftest import FILES


def planned(mini, version="1.2.3", files=FILES, **options):
    return plan(mini.series, version, files, files.__getitem__, **options)


def test_a_file_keeps_its_pristine_bytes_and_each_entrys_result(mini):
    both = FILES["megatron/core/layers.py"] + b"x = old_engine.x\n"
    file = planned(mini, files={**FILES, "megatron/core/layers.py": both})[
        "megatron/core/layers.py"
    ]
    assert file.pristine == both
    (first, sites), (second, swept) = file.stages
    assert (first, second) == ("quant_sites", "new_engine")
    assert b"old_engine" in sites
    assert b"custom_quant_type" in sites
    assert swept == sites.replace(b"old_engine", b"new_engine") == file.content


def test_a_version_that_the_series_was_not_tried_on_names_both(mini):
    with pytest.raises(DriftError, match=r"megatron-core >=1,<2.* 2\.1"):
        planned(mini, version="2.1")


def test_a_missing_file_is_named(mini):
    files = {path: FILES[path] for path in FILES if not path.endswith("layers.py")}
    with pytest.raises(DriftError, match=r"megatron/core/layers\.py.*'quant_sites'"):
        planned(mini, files=files)


def test_edits_of_a_package_that_the_release_does_not_bring_are_not_needed(mini):
    mini.change_patch("quant_sites.py", '"megatron/core/layers.py"', '"megatron/training/a.py"')
    files = {path: FILES[path] for path in FILES if path.startswith("megatron/core")}
    assert sorted(planned(mini, files=files)) == ["megatron/core/gadget.py"]


def test_a_file_of_some_releases_is_edited_in_those(mini):
    mini.change_patch(
        "quant_sites.py", "        ),\n    ),\n)", '        ),\n        "<1.2",\n    ),\n)'
    )
    assert "megatron/core/layers.py" not in planned(mini)
    assert "megatron/core/layers.py" in planned(mini, version="1.1")


def test_a_plan_of_some_files_is_that_part_of_the_whole_plan(mini):
    path = "megatron/core/gadget.py"
    assert planned(mini, only={path}) == {path: planned(mini)[path]}


def test_the_files_that_change_are_planned_and_only_python_is_read(mini):
    def read(path):
        assert path.endswith(".py")
        return FILES[path]

    assert sorted(plan(mini.series, "1.2.3", FILES, read)) == [
        "megatron/core/gadget.py",
        "megatron/core/layers.py",
        "megatron/training/loop.py",
    ]
