"""Forks Python programs from a process that has imported what they all import.

`python fork_server.py SOCKET` is a program of its own, which `forking.py` talks to. A connection is
one program: a message says what to run and brings its standard streams; the answer is its process
id, and later its wait status. What is imported here comes from other projects: a program imports
megatron, and all else of this repository, from where it would in a fresh process.

The server ends when its standard input does.
"""

import atexit
import contextlib
import gc
import importlib
import inspect
import io
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import types
import warnings
import weakref
from pathlib import Path

# What a training imports from other projects, as sys.modules says at the end of one.
LOADED = (
    *("torch", "torch.distributed.run", "torch.utils.tensorboard", "torch.utils.data"),
    *("torch._dynamo", "torch._inductor.compile_fx", "torch.utils.cpp_extension"),
    *("torch.distributed.checkpoint", "torch.distributed._tensor"),
    *(
        "torch.distributed.tensor.parallel",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "torch.onnx",
        "torch.export",
    ),
    *("torch.nn.attention.flex_attention", "torch.testing._internal.common_utils"),
    *("numba.core.caching", "numba.core.ccallback", "numpy", "scipy.sparse", "psutil", "yaml"),
    *(
        "transformers",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.encoder_decoder",
    ),
    *("tokenizers", "huggingface_hub", "tensorboard", "omegaconf", "tiktoken", "tqdm"),
    *("PIL.Image", "packaging.version", "fsspec", "jinja2", "wandb"),
    # ModelOpt imports these. It is not here: its plugins import megatron.
    *("peft", "accelerate", "torchao", "compressed_tensors", "scipy.stats", "requests"),
    *("pandas", "pyarrow.parquet", "pulp", "einops", "absl.logging"),
)
OURS = {"megatron", "mqo", "preflight", "pretrain_gpt", "distill_gpt"}
LARGEST = 1 << 20  # bytes of a message


def main(path):
    """Serve; in each program that is started, become it."""
    site = sys.path[1:]
    load()
    asked, streams = serve(path)
    return become(asked, streams, site)


def load():
    """Import, and start numba's compiler, which takes a second, once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in LOADED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        from numba import types as numbas
        from numba.core.ccallback import CFunc

        CFunc(lambda n: None, ((numbas.int64,), numbas.void), {}, {}).compile()
    # Megatron's operators ask for their sources, which resolves the path of every module, once.
    inspect.getmodule(compile("", "no such file", "exec"))
    # A program's collections, above all the one at its end, need not visit these: it took 2 s.
    gc.collect()
    gc.freeze()


def serve(path):
    """Start programs until the standard input ends; return in each one, with what was asked."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    running, events = {}, select.poll()
    events.register(0)
    events.register(listener)
    print("ready", flush=True)
    while True:
        for file, _ in events.poll():
            if file == 0:
                os._exit(0)
            elif file == listener.fileno():
                connection, _ = listener.accept()
                text, streams, _, _ = socket.recv_fds(connection, LARGEST, 3)
                check_fit()
                pid = os.fork()
                if pid == 0:
                    for one in (listener, connection, *(other for _, other in running.values())):
                        one.close()
                    for one in running:
                        os.close(one)
                    return json.loads(text), streams
                for stream in streams:
                    os.close(stream)
                connection.send(str(pid).encode())
                running[ended := os.pidfd_open(pid)] = (pid, connection)
                events.register(ended)
            else:
                pid, connection = running.pop(file)
                events.unregister(file)
                os.close(file)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):  # nobody waits
                    connection.send(str(status).encode())
                connection.close()


def check_fit():
    """End where a fork of this process could differ from a fresh one."""
    ours = OURS & {name.partition(".")[0] for name in sys.modules}
    threads = threading.active_count(), len(list(Path("/proc/self/task").iterdir()))
    if ours or threads != (1, 1):
        sys.exit(f"fork_server: has imported {sorted(ours)}, has threads: {threads}; wants none")


def become(asked, streams, site):
    """Be as Python is before the first line of a program; the program's code and its names."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for number in asked["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    options, program, words = asked["options"], asked["program"], asked["words"]
    sys.orig_argv = [sys.executable, *options, program, *words]
    text = words.pop(0) if program == "-c" else Path(program).read_bytes()
    sys.argv = [program, *words]
    where = "" if program == "-c" else str(Path(program).parent.resolve())
    here = [] if "-I" in options else [where]
    if "-I" not in options and os.environ.get("PYTHONPATH"):
        here += os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = here + site
    sys.path_importer_cache.clear()
    tempfile.tempdir = None
    if "-u" in options:
        sys.stdout.reconfigure(write_through=True)
        sys.stderr.reconfigure(write_through=True)
    if "ignore" in options:
        warnings.simplefilter("ignore")
    # OpenMP has read the server's OMP_NUM_THREADS.
    threads = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    sys.modules["torch"].set_num_threads(int(threads))
    # A checkpoint's writer spawns a process, which would import torch again, for 3 s.
    multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.get_context("fork")
    # At its end a program need not finalize what the server loaded: it took 0.1 s.
    weakref.finalize._registry.clear()
    names = sys.modules["__main__"] = types.ModuleType("__main__")
    names.__builtins__ = __builtins__
    if program != "-c":
        names.__file__ = program
    return compile(text, program.replace("-c", "<string>"), "exec"), vars(names)


def status_of(error):
    """Say what the interpreter says of an exception that ends a program; the exit code."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def leave(status):
    """End as the interpreter does, but for the objects that the server made, which took 0.3 s."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for thing in gc.get_objects():
        if isinstance(thing, io.IOBase) and not thing.closed:
            thing.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    code, names = main(sys.argv[1])
    try:
        exec(code, names)
    except BaseException as error:
        leave(status_of(error))
    leave(0)
