"""How many bytes live at once."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Follow the storages of `given` tensors and of every operation's results.

    `bytes` is the most that was alive after any operation. What an operation takes and frees
    inside of itself is not seen.
    """

    def __init__(self, *given):
        super().__init__()
        self._live = {}
        self.bytes = 0
        self._note(given)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._note(tree_leaves(result))
        return result

    def _note(self, tensors):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: of for key, of in self._live.items() if not of[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._live.values()))
