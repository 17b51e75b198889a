"""A damaged file of the index cache is named when the datasets cannot be built."""

import numpy as np
import pytest
from mqo.megatron.run.index_cache import IndexCacheError, naming_damage


def fill(folder):
    """A cache with two arrays; the second one, cut short."""
    folder.mkdir(parents=True)
    np.save(folder / "a.npy", np.arange(100))
    np.save(folder / "b.npy", np.arange(100))
    (folder / "a-description.txt").write_text("not an array")
    whole = (folder / "b.npy").read_bytes()
    return folder / "b.npy", whole


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("size", [0, 5, 60, 500])
def test_the_file_is_named_and_the_cause_is_kept(tmp_path, beside, size):
    folder = tmp_path / "data/cache/GPTDataset_indices" if beside else tmp_path / "cache"
    path, whole = fill(folder)
    path.write_bytes(whole[:size])
    place = naming_damage(None if beside else str(folder), [str(tmp_path / "data")])
    with pytest.raises(IndexCacheError) as caught, place:
        np.load(path, mmap_mode="r")
    assert str(path) in str(caught.value) and caught.value.__cause__ is not None


@pytest.mark.parametrize("error", [ValueError("other"), KeyError("other")])
def test_another_failure_is_left_as_it_is(tmp_path, error):
    fill(tmp_path / "cache")
    with pytest.raises(type(error), match="other"), naming_damage(str(tmp_path / "cache"), []):
        raise error
    with pytest.raises(type(error)), naming_damage(None, [str(tmp_path / "missing")]):
        raise error
