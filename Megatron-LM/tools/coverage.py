"""List every matrix product of a training step, with its shape and quant type.

It builds upstream's model as pretrain_gpt.py does, but on the meta device, which needs no data and
no memory, and runs one micro-batch forward and backward through the source of this tree. A recorder
replaces the quantizers: a type is reported only if a site of the source wrapped the operands of the
next product. Products without a site are reported, too. `mqo coverage` prints the result.

All quant options come from the file that MQO_QUANT_CONFIG names, as in a run.

The whole model runs as one rank, for any layout: the shares of a product have the same type on all
ranks. Elementwise operations are not counted. In a run, the content of a token decides which
experts it goes to; here all experts get the same number of tokens.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from mqo.megatron.simulation.watch import named_modules, noting
from mqo.quant import gemms
from mqo.quant.config import current
from mqo.quant.formats import ATTENTION_BACKWARD, NONE, SITES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# argparse takes the last of several values.
ONE_RANK = [f"--{kind}-model-parallel-size=1" for kind in ("tensor", "pipeline", "expert")]
ONE_RANK += ["--context-parallel-size=1"]
# A fused kernel computes the same products, but hides them.
UNFUSED = ["--attention-backend=unfused"]
# A grouped product equals the products of the single experts, at which the sites are seen.
GROUPED = "--moe-grouped-gemm"
aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
BACKWARD = " backward"
RECOMPUTED = "qk_recompute"
ROOT_MODULE, OUTSIDE = "the model", "outside of all modules"


class CoverageError(Exception):
    """Products that cannot be assigned, or whose FLOPs differ from torch's count."""


@dataclass(frozen=True)
class Product:
    """`batch` products of [m, k] by [k, n].

    `gemm` is the name of the site, or of the operation if no site saw it; "mm backward" is a
    product that autograd computes for one of mm. `quant_type` is the layer's type at that site,
    None without a site. `plain` are the operands that the run still leaves unquantized.
    """

    layer: str
    gemm: str
    quant_type: str | None
    batch: int
    m: int
    n: int
    k: int
    plain: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each element of the contraction."""
        return 2 * self.batch * self.m * self.n * self.k


class Operands(gemms.GemmOperands):
    """Replacement of a quantizer: returns both operands unchanged, and records their sizes.

    `named` makes a product of the layer at the site, with the type that the run's excludes, rules
    and rows assign to it; `quant_type` is that type.
    """

    def __init__(self, site: str, layer: str, quant_type: str) -> None:
        super().__init__()
        self.site, self.layer = site, layer
        self.quant_type = current().layer_type(site, layer, quant_type)
        names = (SITES[site].lhs, SITES[site].rhs) if self.quant_type != NONE else ()
        types = {name: current().operand_type(site, name, layer, quant_type) for name in names}
        plain = tuple(name for name in names if types[name] == NONE)
        self.named = partial(Product, layer, site, self.quant_type, plain=plain)
        self.taken: dict[str, int] = {}

    def lhs(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the left operand, unchanged."""
        self.taken["lhs"] = tensor.numel()
        return tensor

    def rhs(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the right operand, unchanged."""
        self.taken["rhs"] = tensor.numel()
        return tensor

    def fit(self, product: Product) -> bool:
        """Return whether the product has the sizes of these two operands."""
        lhs, rhs = product.m * product.k, product.k * product.n
        return self.taken == {"lhs": product.batch * lhs, "rhs": product.batch * rhs}


class Products(TorchDispatchMode):
    """Count the products that run in its block, by layer and GEMM."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Product] = Counter()
        self.flops = 0  # by torch's formulas, of all operations that have one
        self.running: list[str] = []
        self.multiplied: set[str] = set()
        self.waiting: Operands | None = None
        # {autograd node: the forward product that it differentiates}
        self.nodes: dict[int, Product] = {}
        # {(layer, site): operands} of the products of attention's backward pass
        self.backward: dict[tuple[str, str], Operands] = {}

    def operands(self, site: str, quant_type: str, owner: object) -> Operands:
        """Replace `mqo.quant.gemm_operands` in the patched source."""
        operands = Operands(site, getattr(owner, "mqo_layer", self.module), quant_type)
        if site in ATTENTION_BACKWARD:
            self.backward[operands.layer, site] = operands
        else:
            self.refuse_waiting()
            self.waiting = operands
        return operands

    @property
    def module(self) -> str:
        """The innermost module whose forward pass is running."""
        return self.running[-1] if self.running else OUTSIDE

    def refuse_waiting(self) -> None:
        """Raise CoverageError if a site took operands, but no product of them followed."""
        if self.waiting:
            site, layer = self.waiting.site, self.waiting.layer
            raise CoverageError(f"{site} of {layer} took its operands, but no product followed")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count it if it is a product."""
        if func.overloadpacket in PRODUCTS:
            self._count(func.overloadpacket.__name__, *args[-2:])
        result = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result

    def _count(self, operation: str, left: torch.Tensor, right: torch.Tensor) -> None:
        batch = left.shape[0] if left.dim() == 3 else 1
        shape = (batch, left.shape[-2], right.shape[-1], left.shape[-1])
        # Also while recomputing, which modules do within the backward pass.
        forward = bool(self.running) or torch._C._current_autograd_node() is None
        if self.waiting:
            site, self.waiting = self.waiting, None
            product = site.named(*shape)
            if not site.fit(product):
                raise CoverageError(f"{product} does not have the operands that its site took")
        elif forward:
            product = Product(self.module, operation, None, *shape)
        else:
            product = self._differentiated(operation, shape)
        if forward:
            # The node is made just before its product runs; a product without a node runs later.
            node = torch.autograd._get_sequence_nr() - 1
            self.nodes.setdefault(node, product)
            self.multiplied.add(self.module)
        self.counts[product] += 1

    def _differentiated(self, operation: str, shape: tuple[int, int, int, int]) -> Product:
        """Return a product in the backward pass."""
        node = torch._C._current_autograd_node()._sequence_nr()
        origin = self.nodes.get(node, Product("unknown", operation, None, *shape))
        layer, site = origin.layer, self._site_of(origin, shape)
        if (layer, site) not in self.backward:
            return Product(layer, origin.gemm + BACKWARD, None, *shape)
        recomputed = self.backward[layer, RECOMPUTED]
        if site == "dq" and recomputed.quant_type != NONE:  # on the unfused path it is not
            again = recomputed.named(origin.batch, origin.m, origin.n, origin.k)
            self.counts[again] += 1
            self.flops += again.flops
        return self.backward[layer, site].named(*shape)

    @staticmethod
    def _site_of(origin: Product, shape: tuple[int, int, int, int]) -> str:
        """Return the site of the gradient, of this shape, of an operand of a product.

        It is '' for a product that is not attention's.
        """
        left, right = {"qk": ("dq", "dk"), "pv": ("dp", "dv")}.get(origin.gemm, ("", ""))
        return left if shape[1:] == (origin.m, origin.k, origin.n) else right

    @contextmanager
    def following(self, model: torch.nn.Module) -> Iterator[None]:
        """Track which module of the model is running."""
        names = {id(module): name for name, module in named_modules(model, ROOT_MODULE)}
        with noting(names, self.running, OUTSIDE):
            yield


def measure(flags: list[str]) -> dict[str, Any]:
    """Return the products of one micro-batch of the model that `flags` describe."""
    products = Products()
    take_over(products)
    args, model = build([*(word for word in flags if word != GROUPED), *ONE_RANK, *UNFUSED])
    with products, products.following(model):
        step(args, model)
    return {
        "micro_batch": args.micro_batch_size,
        "sequence": args.seq_length,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "products": rows(products),
        "lookups": lookups(model, products.multiplied),
    }


def rows(products: Products) -> list[dict[str, Any]]:
    """Return one row per product; raise CoverageError unless their FLOPs equal torch's count."""
    products.refuse_waiting()
    table = [asdict(p) | {"calls": n, "flops": p.flops * n} for p, n in products.counts.items()]
    total = sum(row["flops"] for row in table)
    if total != products.flops:
        raise CoverageError(f"the products have {total} FLOPs, but torch counts {products.flops}")
    return table


def take_over(products: Products) -> None:
    """Replace quantizers by the recorder and the device by meta; call before importing megatron."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import preflight  # noqa: F401  (checks where megatron comes from)
    from mqo.megatron import device
    from mqo.megatron.run.start import quicken_sources

    quicken_sources()
    vars(gemms).update(gemm_operands=products.operands)
    meta = torch.device("meta")
    vars(device.accelerator)["current_device"] = lambda: meta
    device.accelerator_type = lambda: "meta"
    device.accelerator_device = lambda *address: meta
    # One rank does not communicate, and no backend takes tensors on the meta device.
    torch.distributed.all_reduce = lambda *args, **kwargs: None


def build(flags: list[str]) -> tuple[Any, torch.nn.Module]:
    """Build the labeled model of the flags on meta; return the arguments and the model."""
    from megatron.core import mpu, tensor_parallel
    from megatron.inference.gpt.model_provider import model_provider
    from megatron.inference.gpt.releases import bare_model
    from megatron.training import arguments, global_vars
    from mqo.megatron.run.ranks import with_group
    from mqo.megatron.simulation.routing import with_counts

    sys.argv[1:] = flags
    args = arguments.parse_args()
    args.moe_shared_expert_overlap = False  # else the dispatcher runs the shared experts
    arguments.validate_args(args)
    args.moe_pad_expert_input_to_capacity = False  # every expert gets its even share
    with_counts(imbalance=1.0)
    global_vars.set_args(args)
    if args.vocab_size is None:
        global_vars.build_tokenizer(args)
    with_group()
    mpu.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    with torch.device("meta"):
        model = bare_model(args, model_provider)
    return args, model


def step(args: Any, model: torch.nn.Module) -> None:
    """Run one micro-batch, forward and backward."""
    tokens = torch.empty(args.micro_batch_size, args.seq_length, dtype=torch.long, device="meta")
    model(tokens, tokens, None, labels=tokens).sum().backward()


def lookups(model: torch.nn.Module, multiplied: set[str]) -> list[str]:
    """Return the modules with a 2-D weight that they only look up, such as embeddings."""
    modules = named_modules(model, ROOT_MODULE)
    weights = ((name, getattr(module, "weight", None)) for name, module in modules)
    return [n for n, w in weights if w is not None and w.dim() == 2 and n not in multiplied]
