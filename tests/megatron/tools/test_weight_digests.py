"""The digests of a checkpoint's tensors, as torch writes one."""

import hashlib
import os
import pickle

import pytest

torch = pytest.importorskip("torch")


# torch says that no group is there, where none is meant to be.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@pytest.fixture(scope="module")
def program(load_program):
    return load_program("weight_digests")


@pytest.fixture
def save(tmp_path):
    """A function that saves a state; its folder."""

    from torch.distributed import checkpoint

    def write(name, state):
        checkpoint.save(state, checkpoint_id=tmp_path / name, no_dist=True)
        return tmp_path / name

    return write


STATE = {
    "weight": torch.arange(12.0).reshape(3, 4).to(torch.bfloat16),
    "optimizer": {"exp_avg": torch.full((2, 2), 0.1), "step": torch.tensor(7.0)},
    "args": "no tensor",
}


def test_each_tensor_has_the_hash_of_its_bytes(program, save):
    found = program.digests(save("one", STATE))
    assert sorted(found) == ["optimizer.exp_avg", "optimizer.step", "weight"]
    dtype, shape, digest = found["weight"]
    assert (dtype, shape) == ("torch.bfloat16", [3, 4])
    content = STATE["weight"].view(torch.int16).numpy().tobytes()
    assert digest == hashlib.sha256(content).hexdigest()


def test_equal_states_are_equal_and_one_bit_is_told(program, save):
    one, again = (program.digests(save(name, STATE)) for name in ("one", "again"))
    assert one == again
    bits = STATE["weight"].clone().view(torch.int16)
    bits[2, 3] ^= 1
    other = program.digests(save("other", STATE | {"weight": bits.view(torch.bfloat16)}))
    assert {name for name in one if one[name] != other[name]} == {"weight"}


def test_the_program_writes_them(program, save, tmp_path):
    target = tmp_path / "digests.json"
    program.main(save("one", STATE), target)
    assert '"weight"' in target.read_text()


def test_an_index_that_would_run_code_is_refused(program, tmp_path):
    class Command:
        def __reduce__(self):
            return os.system, (f"touch '{tmp_path / 'ran'}'",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Command()))
    with pytest.raises(RuntimeError, match=r"\w+\.system"):
        program.digests(tmp_path)
    assert not (tmp_path / "ran").exists()
