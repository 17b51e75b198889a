"""Shared code of the six demos: processes, a record of all messages, printing, the comparison.

Import it before any `megatron.core`, so that the one of this tree is imported.
"""

import logging
import os
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.multiprocessing import ProcessExitedException, start_processes
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Warnings of optional packages that no demo needs, and of names that Megatron uses.
warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
warnings.filterwarnings("ignore", category=FutureWarning)
logging.getLogger("megatron").setLevel(logging.ERROR)

import preflight  # noqa: F401  isort: skip
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from mqo.megatron.device import HAS_CUDA, accelerator, accelerator_type

Tensors = dict[str, Tensor]
T = TypeVar("T")
# fp32 rounds each operation by up to 6e-8, and a sum in another order adds several such errors: the
# largest seen is 6e-7. A mistake in a demo causes errors of 1e-3 or more.
TOLERANCE = 5e-6
COLLECTIVES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "send": "send",
    "broadcast": "broadcast",
}


# -- processes ---------------------------------------------------------------------------------


def run(demo: Callable[[], None], processes: int) -> None:
    """Run `demo` in `processes` processes, or in those that torchrun has started.

    Exit with 1 if a process does: if the demo's results differ from those of one process.
    """
    if "RANK" in os.environ:
        _process(int(os.environ["RANK"]), demo, int(os.environ["WORLD_SIZE"]), "env://")
        return
    if HAS_CUDA and torch.cuda.device_count() < processes:
        sys.exit(f"{processes} GPUs are needed. For the CPU: CUDA_VISIBLE_DEVICES= {sys.argv[0]}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (demo, processes, f"file://{folder}/store")
        # A fork skips the imports; CUDA does not work in a fork.
        method = "spawn" if HAS_CUDA else "fork"
        started = start_processes(
            _process, arguments, nprocs=processes, start_method=method, join=False
        )
        # Only now: Python loses an exception that is raised during a fork.
        for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(stop, lambda number, _: sys.exit(128 + number))
        try:
            while not started.join():
                pass
        except ProcessExitedException as error:
            sys.exit(error.exit_code)
        finally:
            for process in started.processes:
                process.kill()  # no effect on a process that has ended
                process.join()


def _process(rank: int, demo: Callable[[], None], processes: int, meeting: str) -> None:
    """Run one of the processes."""
    torch.set_num_threads(1)
    if HAS_CUDA:
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    backend = "nccl" if HAS_CUDA else "gloo"
    distributed.init_process_group(backend, init_method=meeting, rank=rank, world_size=processes)
    try:
        demo()
    finally:
        distributed.destroy_process_group()


@contextmanager
def groups(**sizes: int) -> Iterator[None]:
    """Make Megatron's process groups; `sizes` as `tensor_model_parallel_size=2`."""
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def alone(reference: Callable[[], T]) -> T:
    """Return the result of `reference` on one process: each rank runs it, and sends nothing."""
    with groups(), Wire() as wire:
        torch.manual_seed(1)
        result = reference()
    assert not wire.sent, f"the reference sent {wire.lines()}"
    return result


def config(**more: Any) -> TransformerConfig:
    """Return the configuration of the demos: small, fp32, no dropout, nothing fused."""
    chosen: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
    }
    return TransformerConfig(**chosen | more)


def random(*shape: int, seed: int) -> Tensor:
    """Return the same random numbers on every rank, on the rank's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(accelerator_type())


# -- what is sent ------------------------------------------------------------------------------


class Wire(TorchDispatchMode):
    """Record every collective in its block, so that no demo reports its own messages."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.sent: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note it if it sends."""
        if func.namespace == "c10d":
            self._note(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _note(self, operation: str, args: tuple) -> None:
        name = next((COLLECTIVES[c] for c in COLLECTIVES if c in operation), None)
        if name is None:  # an operation that receives
            return
        # The group is the argument after the tensors.
        index = next(i for i, arg in enumerate(args) if isinstance(arg, torch.ScriptObject))
        handed_in = args[index - 1] if isinstance(args[index - 1], list) else [args[index - 1]]
        size = sum(tensor.nbytes for tensor in handed_in)
        group = distributed.ProcessGroup.unbox(args[index])
        ranks = distributed.get_process_group_ranks(group)
        if len(ranks) == 1:  # nothing is sent in a group of one rank
            return
        where = f"to rank {ranks[args[index + 1]]}" if name == "send" else f"over {ranks}"
        self.sent[self.phase, f"{name:14} {where:17} {size:>7,} bytes"] += 1

    def lines(self) -> list[str]:
        """Return a line for each kind of message, in the order of their first."""
        width = max((len(phase) for phase, _ in self.sent), default=0)
        return [f"{phase:{width}}  {n} x {text}".strip() for (phase, text), n in self.sent.items()]


# -- printing and the comparison ---------------------------------------------------------------


def say(title: str, lines: list[str]) -> None:
    """Print every rank's lines in rank order; print lines that all ranks share only once."""
    every = gathered(lines)
    if distributed.get_rank() == 0:
        print(f"\n{title}")
        equal = all(told == lines for told in every)
        for rank, told in [("each", lines)] if equal else enumerate(every):
            who = "each rank" if equal else f"rank {rank}"
            for number, line in enumerate(told):
                print(f"  {who if number == 0 else '':9}  {line}")
        sys.stdout.flush()


def gathered(own: T) -> list[T]:
    """Return every rank's object, in rank order."""
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, own)
    return every


def load(model: torch.nn.Module, weights: Tensors) -> None:
    """Set every weight of the model, by name."""
    for name, weight in model.named_parameters():
        weight.data.copy_(weights[name])


def weights_of(model: torch.nn.Module) -> Tensors:
    """Return a copy of every weight."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def deviation(ours: Tensors, theirs: Tensors) -> float:
    """Return the largest, over the tensors, of max |ours - theirs| / max |theirs|."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max(
        ((ours[name] - right).abs().max() / right.abs().max()).item()
        for name, right in theirs.items()
    )


def agree(**pairs: tuple[Tensors, Tensors]) -> None:
    """Print the largest deviation of any rank's pairs; exit with 1 if it exceeds TOLERANCE."""
    every = gathered({name: deviation(*pair) for name, pair in pairs.items()})
    largest = {name: torch.tensor([each[name] for each in every]).max() for name in pairs}
    equal = all(value <= TOLERANCE for value in largest.values())  # NaN is not
    if distributed.get_rank() == 0:
        print("\nagainst one process, max relative deviation")
        for name, value in largest.items():
            print(f"  {name:10} {value:.1e}")
        print(f"{'EQUAL' if equal else 'DIFFERENT'}: the tolerance is {TOLERANCE:.0e}", flush=True)
    distributed.barrier()  # no process ends another one that has not printed
    if not equal:
        sys.exit(1)
