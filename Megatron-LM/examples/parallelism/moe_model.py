"""A small mixture-of-experts model, not a GPTModel, that ep.py and edp.py train.

    token -> embedding -> norm -> router -> 2 of 4 experts -> sum, weighted -> + -> head -> loss
                      \\____________________________________________________/

The mixture (router, dispatch of tokens, experts) is Megatron's, the rest is defined here. Attention
is left out: a model that predicts the next token only from this one has the same traffic.
"""

import re
from functools import partial

import torch
import world
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from mqo.megatron.device import accelerator_type
from torch import Tensor
from torch.nn.functional import cross_entropy

VOCABULARY, SEQUENCE, SEQUENCES, HIDDEN, EXPERTS, CHOSEN = 64, 16, 8, 64, 4, 2


class MoeModel(MegatronModule):
    """Next-token logits from single tokens; builds only the experts of this rank."""

    def __init__(self) -> None:
        config = world.config(
            hidden_size=HIDDEN,
            add_bias_linear=False,
            num_moe_experts=EXPERTS,
            moe_ffn_hidden_size=2 * HIDDEN,
            moe_router_topk=CHOSEN,
            # Each rank computes a balancing loss of its own tokens, unlike one process.
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        )
        super().__init__(config)
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = partial(SequentialMLP, submodules=linears)
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.norm = torch.nn.RMSNorm(HIDDEN)
        self.mixture = MoELayer(config, MoESubmodules(experts=experts))
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        # How many of this rank's tokens the router gave each expert.
        self.routed: list[int] = []
        self.mixture.router.register_forward_hook(self._count)
        self.to(accelerator_type())

    def _count(self, router: torch.nn.Module, args: tuple, output: tuple[Tensor, Tensor]) -> None:
        _, chosen = output  # [tokens, experts], True where an expert is chosen
        self.routed = chosen.sum(0).tolist()

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss in nats of text [sequence + 1, sequences]."""
        x = self.embedding(text[:-1])
        mixed, _ = self.mixture(self.norm(x))
        return cross_entropy(self.head(x + mixed).flatten(0, 1), text[1:].flatten())


def sequences() -> Tensor:
    """Return the whole batch [sequence + 1, sequences]."""
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(VOCABULARY, (SEQUENCE + 1, SEQUENCES), generator=generator)
    return text.to(accelerator_type())


def whole_name(name: str) -> str:
    """Return a weight's name in the whole model, where experts are numbered over all ranks."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * EXPERTS // ranks

    def renumber(match: re.Match[str]) -> str:
        return f"local_experts.{int(match[1]) + first}."

    return re.sub(r"local_experts\.(\d+)\.", renumber, name)


def of_this_rank(model: torch.nn.Module, whole: world.Tensors) -> world.Tensors:
    """Select the tensors of the whole model that this rank's model has, under the rank's names."""
    return {name: whole[whole_name(name)] for name, _ in model.named_parameters()}


def one_process() -> tuple[world.Tensors, ...]:
    """Return the weights of all experts, and loss and gradients of all sequences."""
    model = MoeModel()
    loss = model(sequences())
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return world.weights_of(model), {"loss": loss.detach()}, gradients
