"""Describe how GPUs share a training, and give upstream's flags for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from mqo.matrix import layer_pattern
from mqo.matrix.tables import Dtype, Shape

Recompute = Literal["none", "core_attn", "full"]
# Upstream's flags for what a layer's backward pass recomputes.
_RECOMPUTE: dict[Recompute, str] = {
    "none": "",
    "core_attn": "--recompute-granularity selective --recompute-modules core_attn",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
# Upstream's default for up to 40 ranks. For more ranks it grows, and then a checkpoint of the
# distributed optimizer, which is stored by buckets, could not be loaded on more ranks.
BUCKET = 40_000_000
# Fields of a layout -> upstream's arguments.
ARGUMENTS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
    "context": "context_parallel_size",
    "sharded": "use_distributed_optimizer",
    "overlap": "overlap_grad_reduce",
    "bucket": "ddp_bucket_size",
    "reshardable": "dist_ckpt_optim_fully_reshardable",
}


@dataclass(frozen=True)
class Layout:
    """Parallel sizes over `gpus` processes; experts have the tensor size of the other layers.

    `sharded` is the distributed optimizer, `overlap` its communication during computation, in
    buckets of `bucket` weights. `reshardable` checkpoints can be loaded at other tensor and
    pipeline sizes.
    """

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    recompute: Recompute = "none"
    sharded: bool = True
    overlap: bool = True
    bucket: int = BUCKET
    reshardable: bool = False

    @classmethod
    def of_arguments(
        cls, gpus: int, args: Mapping[str, Any], recompute: Recompute = "none"
    ) -> Self:
        """Return the layout in upstream's arguments."""
        sizes = {field: args[name] for field, name in ARGUMENTS.items()}
        # Upstream's default, stored because it would differ on more ranks.
        sizes["bucket"] = sizes["bucket"] or max(
            BUCKET, 1_000_000 * args["data_parallel_size"] * sizes["context"]
        )
        return cls(gpus, **sizes, recompute=recompute)

    @property
    def data(self) -> int:
        """Return the data-parallel size: the number of parts of the batch."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def copies(self) -> int:
        """Return the number of ranks that hold the same weights, except those of experts."""
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def expert_copies(self) -> int:
        """Return the number of ranks that hold the same experts."""
        return self.copies // self.expert

    def layers(self, model: Shape, stage: int) -> tuple[str, ...]:
        """Return the layers of a pipeline stage, each as symbols of `mqo.matrix.layer_pattern`.

        A layer of a GPT has two parts, a layer of a HybridModel has one.
        """
        if model.pattern is not None:
            return tuple(layer_pattern.stages_of(model.pattern, self.pipeline)[stage])
        count = model.num_layers // self.pipeline
        return model.blocks[stage * count : (stage + 1) * count]

    def flags(self, dtype: Dtype = "bf16") -> tuple[str, ...]:
        """Return upstream's flags.

        In fp16, parameters are gathered without overlap: upstream adds the hooks for it only at the
        first step that the loss scale allows, and an evaluation before that step fails.
        """
        gathers = self.overlap and self.sharded and dtype != "fp16"
        words = {
            "--use-distributed-optimizer": self.sharded,
            "--dist-ckpt-optim-fully-reshardable": self.sharded and self.reshardable,
            f"--overlap-grad-reduce --ddp-bucket-size {self.bucket}": self.overlap,
            "--overlap-param-gather": gathers,
            _RECOMPUTE[self.recompute]: True,
            f"--tensor-model-parallel-size {self.tensor} --sequence-parallel": self.tensor > 1,
            f"--pipeline-model-parallel-size {self.pipeline}": self.pipeline > 1,
            f"--context-parallel-size {self.context}": self.context > 1,
            f"--expert-model-parallel-size {self.expert}": self.expert > 1,
            "--moe-token-dispatcher-type alltoall": self.expert > 1,
        }
        return tuple(" ".join(word for word, given in words.items() if given).split())

    def __str__(self) -> str:
        """Return the sizes above 1, and the other settings that affect memory."""
        sizes = {"TP": self.tensor, "PP": self.pipeline, "CP": self.context, "EP": self.expert}
        words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        optimizer = "distributed optimizer" if self.sharded else "optimizer states on every GPU"
        again = {"none": [], "core_attn": ["attention recomputed"], "full": ["layers recomputed"]}
        return ", ".join([*words, f"DP {self.data}", optimizer, *again[self.recompute]])
