"""Change what the codemod portable_device cannot express, place by place.

The code here uses torch.cuda. That codemod runs later, and also rewrites the inserted code to call
mqo/megatron/device.py.
"""

from mqo.overlay.edits import AddImport, Anchor, FileEdits, PrependBody, ReplaceExpression

# The two chunks of the sequence that a context-parallel rank has.
CHUNKS = 'torch.tensor([cp_rank, (2 * cp_size - cp_rank - 1)], device="cpu", pin_memory={})'
# Only an accelerator can pin memory.
UNPINNED = CHUNKS.format("torch.cuda.is_available()")

FILES = (
    FileEdits(
        "megatron/training/initialize.py",
        (
            # On a machine with CUDA devices, CUDA is still required.
            ReplaceExpression(
                "initialize_megatron",
                Anchor("torch.cuda.is_available()"),
                "torch.cuda.is_available() or torch.cuda.device_count() > 0",
            ),
        ),
    ),
    FileEdits(
        "megatron/training/initialize.py",
        (
            # The fused softmax needs nvcc, which a machine without CUDA lacks.
            ReplaceExpression(
                "_compile_dependencies",
                Anchor("fused_kernels.load(args)", count=2),
                "fused_kernels.load(args) if torch.cuda.is_available() else None",
            ),
        ),
        versions="<0.17",
    ),
    FileEdits(
        "megatron/core/tensor_parallel/random.py",
        (
            # Upstream queues this call until CUDA starts, which never happens on a CPU.
            PrependBody(
                "_set_cuda_rng_state",
                "if not torch.cuda.is_available():\n"
                "    torch.cuda.set_rng_state(new_state)\n"
                "    return\n",
            ),
        ),
    ),
    FileEdits(
        "megatron/core/jit.py",
        (
            # torch.compile needs a C++ compiler, and gains nothing at the sizes that CPUs train.
            PrependBody(
                "enable_jit_fuser",
                "if not torch.cuda.is_available():\n    disable_jit_fuser()\n    return\n",
            ),
        ),
        versions=">=0.16",
    ),
    FileEdits(
        "megatron/core/jit.py",
        (
            # The same for releases that choose the fuser once, at import.
            ReplaceExpression(
                "",
                Anchor("torch.compile"),
                "torch.compile if torch.cuda.is_available() else lambda function: function",
            ),
        ),
        versions="<0.16",
    ),
    FileEdits(
        "megatron/core/datasets/utils.py",
        (
            # The wheel contains the compiled helper, and no Makefile to compile it.
            PrependBody(
                "compile_helpers",
                "import importlib.util\n"
                "if importlib.util.find_spec('megatron.core.datasets.helpers_cpp'):\n"
                "    return\n",
            ),
        ),
    ),
    FileEdits(
        "megatron/core/models/common/embeddings/rope_utils.py",
        (ReplaceExpression("get_pos_emb_on_this_cp_rank", Anchor(CHUNKS.format(True)), UNPINNED),),
    ),
    FileEdits(
        "megatron/core/utils.py",
        (
            # A CPU sums the squares of a large tensor one by one: in fp32 the norm of 4 million
            # elements is off by 8e-5, and differs in a layout that splits the tensor.
            ReplaceExpression(
                "local_multi_tensor_l2_norm",
                Anchor("torch.norm(tensor)"),
                "torch.norm(tensor, dtype=None if tensor.is_cuda else torch.float64)",
            ),
        ),
    ),
    FileEdits(
        "megatron/core/transformer/moe/moe_utils.py",
        (
            # A tensor on the CPU must become an array, too, because alltoall needs one.
            ReplaceExpression(
                "maybe_move_tensor_to_cpu",
                Anchor("tensor.is_cuda"),
                "(tensor.is_cuda or not torch.cuda.is_available())",
            ),
        ),
        versions=">=0.12",
    ),
    FileEdits(
        "megatron/core/tensor_parallel/mappings.py",
        (
            # Ranks that share an expert have different numbers of tokens for it.
            AddImport("from mqo.megatron.device import all_gather, reduce_scatter"),
            ReplaceExpression(
                "_gather_along_first_dim", Anchor("torch.distributed.all_gather"), "all_gather"
            ),
            ReplaceExpression(
                "_reduce_scatter_along_first_dim",
                Anchor("torch.distributed.reduce_scatter"),
                "reduce_scatter",
            ),
        ),
    ),
)
