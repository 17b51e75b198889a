"""Commands that a signal ends: nothing that they started runs on, and no temporary folder stays."""

import json
import os
import select
import signal
import struct
import subprocess
import sys
import textwrap
from contextlib import contextmanager, suppress

import psutil
import pytest
from mqo.project import Project

PROJECT = Project.here()
MQO = (sys.executable, "-m", "mqo")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
# In a program's place: it leaves a folder behind, has a child in a session of its own, and both
# hold a pipe open. A byte says that they run, the end of the pipe that they are gone.
STAND_IN = """
import os, subprocess, sys, tempfile
tempfile.mkdtemp()
child = "import os, signal; os.write(1, b'x'); signal.pause()"
with open(os.environ["PIPE"], "wb") as pipe:
    subprocess.run([sys.executable, "-c", child], stdout=pipe, start_new_session=True)
"""
LIMIT_S = 120  # to fail rather than to hang


@pytest.fixture
def place(tmp_path):
    """A tree with stand-ins, a run that saved, weights, a pip, a temporary folder and a pipe."""
    for program in ("tools/evaluate.py", "tools/convert.py", "pip/__main__.py"):
        (tmp_path / program).parent.mkdir(exist_ok=True)
        (tmp_path / program).write_text(STAND_IN)
    (tmp_path / "pip/__init__.py").touch()
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").write_text("3")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "weights/model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (tmp_path / "tmp").mkdir()
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


@contextmanager
def begun(place, *words):
    """A command with a temporary folder of its own; SIGINT is not ignored, whoever runs this."""
    variables = {"TMPDIR": str(place / "tmp"), "PIPE": str(place / "pipe")}
    # torch's cache is no rubbish, and is in the temporary folder unless it is told otherwise.
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(place / "compiled")
    words = [str(word) for word in words]
    with subprocess.Popen(
        words,
        env=os.environ | variables | {"PYTHONPATH": str(place)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as command:
        try:
            yield command
        finally:
            command.kill()


def ended_cleanly(place, command, signum):
    command.send_signal(signum)
    said = command.communicate(timeout=LIMIT_S)[1]
    assert command.returncode == CODES[signum], said
    assert "Traceback" not in said
    assert list((place / "tmp").iterdir()) == []


COMMANDS = {
    "eval": (*MQO, "eval", "run", "--tree", "."),
    "generate": (*MQO, "generate", "run", "--prompt", "x", "--tree", "."),
    "convert finalize": (*MQO, "convert", "finalize", "run", "new", "--tree", "."),
    "convert hf-to-megatron": (*MQO, "convert", "hf-to-megatron", "weights", "new", "--tree", "."),
    "convert megatron-to-hf": (*MQO, "convert", "megatron-to-hf", "run", "new", "--tree", "."),
    "a download": (
        sys.executable,
        "-c",
        "import sys; from mqo import pip; from mqo.terminal import guarded\n"
        "from pathlib import Path\n"
        "guarded(lambda: pip.download('mill==1', Path(sys.argv[1])))",
        "new",
    ),
}
TWICE = [(name, signal.SIGTERM) for name in COMMANDS] + [
    ("eval", signal.SIGINT),
    ("eval", signal.SIGHUP),
    ("convert hf-to-megatron", signal.SIGINT),
]


@pytest.mark.parametrize(("name", "signum"), TWICE)
@pytest.mark.slow
def test_a_program_ends_with_the_command(place, name, signum):
    if name.startswith("convert"):
        pytest.importorskip("modelopt")
    paths = {"run", "weights", "new", "."}
    words = [str(place / word) if word in paths else word for word in COMMANDS[name]]
    pipe = os.open(place / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with begun(place, *words) as command:
            ready = select.select([pipe], [], [], LIMIT_S)[0]
            assert ready and os.read(pipe, 1) == b"x", "the program did not start"
            ended_cleanly(place, command, signum)
        assert os.read(pipe, 1) == b"", "the program lives on"
    finally:
        os.close(pipe)
    assert sorted(path.name for path in place.glob("*new*") if any(path.iterdir())) == []


def descendants(command):
    try:
        return psutil.Process(command.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_for(command, count, name):
    """The processes below the command, as soon as `count` of them have `name` in their words."""
    while command.poll() is None:
        found = descendants(command)
        try:
            if sum(name in " ".join(process.cmdline()) for process in found) >= count:
                return found
        except psutil.Error:  # gone in between
            pass
        with suppress(subprocess.TimeoutExpired):
            command.wait(0.1)
    raise AssertionError(f"it ended before it started anything: {command.communicate()}")


def test_the_program_of_data_prepare_ends_with_it(place, tmp_path):
    text = PROJECT.data / "wikipedia/text.jsonl"
    if not text.exists():
        pytest.skip("the sample is not there: run `mqo setup`")
    corpus = tmp_path / "corpus.jsonl"
    # Of 20 copies the command once ended, in 10 s, before it was stopped.
    corpus.write_bytes(100 * text.read_bytes())
    words = ["data", "prepare", "jsonl", "--input", corpus, "--output", tmp_path / "mine"]
    words += ["--tokenizer", PROJECT.data / "wikipedia/tokenizer", "--workers", "2"]
    with begun(place, *MQO, *words) as command:
        found = wait_for(command, 1, "preprocess")
        ended_cleanly(place, command, signal.SIGTERM)
    assert not any(process.is_running() for process in found)
    assert not list(tmp_path.glob("mine*"))


@pytest.mark.heavy
def test_real_programs_of_verify_end_with_it(place, vendored):
    del vendored
    with begun(place, *MQO, "verify") as command:
        found = wait_for(command, 1, "verify_forward.py")
        ended_cleanly(place, command, signal.SIGTERM)
    assert not any(process.is_running() for process in found)


@pytest.mark.parametrize("script", ["train_config.py", "quant_type_modifier.py"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_is_stopped_shows_no_traceback(place, script, signum):
    """The stop comes from within, while the command line is being parsed."""
    (place / "argparse.py").write_text(
        textwrap.dedent(f"""
            import importlib.util, os, sys
            sys.path.remove({str(place)!r})
            del sys.modules["argparse"]
            from argparse import *
            def stop(self, *words): os.kill(os.getpid(), {int(signum)})
            ArgumentParser.parse_known_args = stop
        """)
    )
    with begun(place, sys.executable, PROJECT.root / "script" / script, "--list") as command:
        said = command.communicate(timeout=LIMIT_S)[1]
    assert (command.returncode, said) == (CODES[signum], "")


def test_nothing_else_in_mqo_starts_a_process_or_makes_a_temporary_folder():
    """What process.py does for all; a sweep's jobs end with it by other means."""
    words = ("subprocess.run", "subprocess.Popen(", "TemporaryDirectory", "mkdtemp")
    found = {
        path.relative_to(PROJECT.root / "tools/mqo").as_posix()
        for path in (PROJECT.root / "tools/mqo").rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in words)
    }
    assert found == {"process.py", "sweep/local.py", "sweep/slurm.py"}


@pytest.mark.heavy
def test_the_processes_of_a_demo_end_with_it(place, vendored):
    demo = place / "demo.py"
    demo.write_text(
        textwrap.dedent(f"""
            import os, signal, sys
            sys.path.insert(0, {str(vendored.root / "examples/parallelism")!r})
            import world
            def wait():
                with open(os.environ["PIPE"], "wb") as pipe:
                    pipe.write(b"x")
                    pipe.flush()
                    signal.pause()
            world.run(wait, 2)
        """)
    )
    with begun(place, sys.executable, demo) as command:
        with (place / "pipe").open("rb") as pipe:
            assert pipe.read(2) == b"xx"
        found = descendants(command)
        assert len(found) >= 2
        ended_cleanly(place, command, signal.SIGTERM)
    assert not any(process.is_running() for process in found)
