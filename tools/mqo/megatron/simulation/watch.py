"""Observe every operation of a program, with its source line, layer and direction."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import megatron
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode

# The folders of mqo and of Megatron: a run's source has both, the first inside the second.
ROOTS = (
    Path(__file__).resolve().parents[3],
    Path(next(iter(megatron.__path__))).resolve().parent,
)
OWN = "mqo/megatron/simulation/"
PROGRAMS = ("tools/simulate.py", "mqo/megatron/run/answer.py")
QUANTIZERS = "mqo/quant/"
# Frames that call autograd's engine: torch's own, and upstream's.
ENGINE, ENGINE_CALLER = "torch/autograd/graph.py", "custom_backward"
BACKWARD = "backward of "


class Origin(NamedTuple):
    """The origin of an operation: "path:line" in the tree, and the layer that runs.

    If `quantizes`, a quantizer runs the operation, and `line` is the quantizer's caller.
    """

    line: str
    layer: str
    quantizes: bool


@dataclass(slots=True)
class Call:
    """An operation that ran. `clock` counts operations; `backward` marks one of autograd.

    `recomputed` marks a forward pass within the backward pass.
    """

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    result: Any
    origin: Origin
    clock: int
    backward: bool
    recomputed: bool


Observer = Callable[[Call], None]


class Watch(TorchDispatchMode):
    """Run operations, and report each to the observers."""

    def __init__(self, *observers: Observer) -> None:
        super().__init__()
        self.observers = observers
        self.clock = 0
        self.running: list[str] = []
        self._hidden = 0
        # {autograd node: the origin of the operation that it differentiates}
        self._nodes: dict[int, Origin] = {}
        self._lines = _Lines()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and report it."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # the same answer, faster: half of all operations
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._hidden == 0:
            self.tell(func, args, kwargs, result)
        return result

    def tell(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Report an operation to the observers."""
        self.clock += 1
        node = torch._C._current_autograd_node()
        call = Call(
            func=func,
            args=args,
            kwargs=kwargs,
            result=result,
            origin=self._origin(node),
            clock=self.clock,
            backward=node is not None,
            recomputed=node is not None and bool(self.running),
        )
        for observe in self.observers:
            observe(call)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Report nothing inside the block, which is one kernel on a GPU."""
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1

    @contextmanager
    def following(self, models: list[torch.nn.Module]) -> Iterator[None]:
        """Track which of the models' modules runs."""
        names = {id(module): name for model in models for name, module in named_modules(model)}
        with noting(names, self.running):
            yield

    def _origin(self, node: Any) -> Origin:
        line, quantizes, by_engine = self._lines.here()
        if node is not None and by_engine and not self.running:
            forward = self._nodes.get(node._sequence_nr())
            return (
                forward._replace(line=BACKWARD + forward.line)
                if forward
                else Origin(line, "", False)
            )
        origin = Origin(line, self.running[-1] if self.running else "", quantizes)
        if node is not None and not self.running:
            forward = self._nodes.get(node._sequence_nr())
            origin = origin._replace(layer=forward.layer if forward else "")
        # autograd creates the node just before its operation runs.
        self._nodes.setdefault(torch.autograd._get_sequence_nr() - 1, origin)
        return origin


def named_modules(model: torch.nn.Module, root: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (path from the unwrapped model, module); the path of the model is `root`."""
    for name, module in model.named_modules():
        while name.split(".")[0] == "module":
            name = name.partition(".")[2]
        yield name or root, module


@contextmanager
def noting(names: Mapping[int, str], running: list[str], outside: str = "") -> Iterator[None]:
    """Track the modules whose forward passes run in `running`, the innermost one last.

    `names` are by a module's id. Other modules count as their caller, or as `outside` without
    one.
    """

    def enter(module: torch.nn.Module, args: object) -> None:
        running.append(names.get(id(module), running[-1] if running else outside))

    def leave(module: torch.nn.Module, args: object, output: object) -> None:
        running.pop()

    hooks = (
        torch_module.register_module_forward_pre_hook(enter),
        torch_module.register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Lines:
    """Find the line of the tree that runs."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    def here(self) -> tuple[str, bool, bool]:
        """Return the line, whether a quantizer called from it, and whether the engine runs."""
        quantizes = False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            path = self._paths.get(name)
            if path is None:
                path = self._paths[name] = _in_tree(name)
            if path == ENGINE or frame.f_code.co_name == ENGINE_CALLER:
                return f"{path}:{frame.f_lineno}", quantizes, True
            elif path.startswith(QUANTIZERS):
                quantizes = True
            elif path:
                return f"{path}:{frame.f_lineno}", quantizes, False
            frame = frame.f_back
        return "", quantizes, False


def _in_tree(name: str) -> str:
    """Return a file's path in its root; "" for a file elsewhere or in this package."""
    if name.endswith(ENGINE):
        return ENGINE
    prefix = next((f"{root}/" for root in ROOTS if name.startswith(f"{root}/")), "/")
    path = name.removeprefix(prefix) if prefix != "/" else ""
    return "" if path.startswith((OWN, *PROGRAMS)) else path
