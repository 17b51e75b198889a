"""Run as a program: gradients of one distillation step, its batch cut in several ways.

python step_ranks.py FOLDER_OF_THE_DEMOS FOLDER STAGES TENSOR_RANKS PROCESSES

Prints, as JSON, {name: {"RANKS x MICRO_BATCHES": deviation}} for each NAME.yaml in FOLDER, a
distillation's configuration. A deviation is the largest one of any rank's gradients and losses from
those of one micro-batch on one rank. One process writes these to NAME.pt; two read them. Tensor
ranks, which hold shards, compare theirs with those of one micro-batch in the same layout, and their
losses with those of the first.
"""

import json
import sys
import zlib
from functools import partial
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch
import world  # first of Megatron: it makes its tree's the one that is found
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.inference.algos import distillation
from megatron.inference.gpt.loss_func import loss_func
from megatron.inference.gpt.steps import with_steps
from modelopt.torch import distill as mtd

LAYERS, VOCABULARY, SEQUENCE, BATCH = 4, 96, 16, 8
CUTS = (1, 4)
FOLDER, STAGES, TENSOR_RANKS, PROCESSES = Path(sys.argv[2]), *map(int, sys.argv[3:])
DATA_RANKS = PROCESSES // STAGES // TENSOR_RANKS


def gpt(width):
    config = world.config(
        num_layers=LAYERS,
        hidden_size=width,
        pipeline_model_parallel_size=STAGES,
        tensor_model_parallel_size=TENSOR_RANKS,
        sequence_parallel=TENSOR_RANKS > 1,
        pipeline_dtype=torch.float32,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def whole_name(name):
    """The name that a parameter of this stage has in a model of one stage."""
    first = parallel_state.get_pipeline_model_parallel_rank() * LAYERS // STAGES
    words = name.split(".")
    if "layers" in words:
        place = words.index("layers") + 1
        words[place] = str(int(words[place]) + first)
    return ".".join(words)


def student_of(path):
    """A student and its teacher, with weights that follow from names."""
    student, teacher = gpt(64), gpt(96)
    config = distillation.load_distillation_config(str(path), student.config, teacher.config)
    mode = {"teacher_model": teacher} | {k: config[k] for k in ("criterion", "loss_balancer")}
    student = mtd.convert(student, mode=[("kd_loss", mode)])
    distillation.adjust_distillation_model_for_mcore(student, config)
    for name, weight in student.named_parameters():
        seed = zlib.crc32(whole_name(name).encode())
        weight.data.copy_(world.random(*weight.shape, seed=seed) / weight.shape[-1] ** 0.5)
        if "norm" in name:
            weight.data.add_(1)
    student.train()
    return student


def batch():
    """8 sequences, of which different numbers of tokens count."""
    drawn = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=drawn)
    lengths = torch.tensor([16, 3, 9, 16, 1, 12, 7, 16])
    mask = (torch.arange(SEQUENCE) < lengths[:, None]).float()
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].contiguous(), "loss_mask": mask}


def micro_batches(count):
    """This rank's micro-batches, as upstream's samplers give them out."""
    rank = parallel_state.get_data_parallel_rank()
    size = BATCH // (DATA_RANKS * count)
    for i in range(count):
        first = (i * DATA_RANKS + rank) * size
        yield {name: of[first : first + size] for name, of in batch().items()}


def forward_step(data, model):
    # As the trainer does: one of the tensor ranks reads, and all get the batch.
    given = next(data) if data else None
    group = parallel_state.get_tensor_model_parallel_group()
    every = [None] * group.size()
    torch.distributed.all_gather_object(every, given, group=group)
    given = every[0]
    positions = torch.arange(SEQUENCE).expand_as(given["tokens"])
    output = model(given["tokens"], positions, None, labels=given["labels"])
    return output, partial(loss_func, given["loss_mask"], model)


def gradients(path, count):
    """{parameter: gradient}, and on the last stage {loss: the step's value}."""
    student = student_of(path)
    student.config.finalize_model_grads_func = finalize_model_grads
    model = DistributedDataParallel(student.config, DistributedDataParallelConfig(), student)
    student.config.no_sync_func = model.no_sync
    model.zero_grad_buffer()
    reads = parallel_state.get_tensor_model_parallel_rank() == 0
    given = {}
    if STAGES > 1:
        given["adjust_tensor_shapes_fn"] = distillation.widened_shapes(student)
    reports = with_steps(get_forward_backward_func())(
        forward_step_func=forward_step,
        data_iterator=micro_batches(count) if reads else None,
        model=[model],
        num_microbatches=count,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH // (DATA_RANKS * count),
        forward_only=False,
        **given,
    )
    made = {
        whole_name(name): weight.main_grad.clone()
        for name, weight in student.named_parameters()
        if weight.requires_grad
    }
    for name in reports[0] if reports else ():
        made[name] = torch.stack([report[name] for report in reports]).mean()
    return made


def deviations(path):
    """{cut: the largest deviation of any rank}."""
    found, reference = {}, path.with_suffix(".pt")
    expected = torch.load(reference) if STAGES > 1 or DATA_RANKS > 1 else None
    for count in [count for count in CUTS if count * DATA_RANKS <= BATCH]:
        made = gradients(path, count)
        expected = expected or made
        if PROCESSES == count == 1:
            torch.save(made, reference)
        own = world.deviation(made, {name: expected[name] for name in made})
        if TENSOR_RANKS > 1:
            losses = {name: value for name, value in made.items() if name.endswith(" loss")}
            own = max(own, world.deviation(losses, world.gathered(losses)[0]))
        found[f"{DATA_RANKS} x {count}"] = max(world.gathered(own))
    return found


def check():
    sizes = {"pipeline_model_parallel_size": STAGES, "tensor_model_parallel_size": TENSOR_RANKS}
    with world.groups(**sizes):
        found = {path.stem: deviations(path) for path in sorted(FOLDER.glob("*.yaml"))}
    if torch.distributed.get_rank() == 0:
        print("FOUND", json.dumps(found))


world.run(check, processes=PROCESSES)
