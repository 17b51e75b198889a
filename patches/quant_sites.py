"""Add the five GEMM sites: a literal with the quant type, and a GEMM of quantized operands.

The operands and the called function are wrapped; `alpha`, `beta` and `out=` stay upstream's. The
similar calls in LinearWithFrozenWeight are outside the scope and stay, too.
"""

from mqo.overlay.edits import (
    AddImport,
    Anchor,
    Edit,
    FileEdits,
    InsertBefore,
    ReplaceExpression,
    WrapOperands,
)

LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
IMPORT = AddImport("from mqo.quant import gemm_operands")
IMPORT_SAVED = AddImport("from mqo.quant import gemm_operands, saved_operands")


def gemm(
    site: str,
    scope: str,
    *forms: Anchor,
    lhs: str,
    rhs: str,
    owner: str,
    before: Anchor | None = None,
    then: str = "",
) -> tuple[Edit, Edit]:
    """Return the edits that put a literal before a GEMM and wrap its function and its operands.

    `forms` are the calls that compute this GEMM on upstream's code paths. The literal is inserted
    into the block that encloses all of them, or before the statement of `before`, if given.
    `owner` is an expression for the labeled object; `then` is a method call on the operands.
    """
    binding = f"{site}_operands"
    code = (
        "custom_quant_type = 'none'\n"
        f"{binding} = gemm_operands('{site}', custom_quant_type, {owner})\n"
        + (f"{binding}.{then}\n" if then else "")
    )
    wrappers = {lhs: f"{binding}.lhs", rhs: f"{binding}.rhs"}
    position = (before,) if before else forms
    return InsertBefore(scope, position, code), WrapOperands(
        scope, forms, wrappers, f"{binding}.product"
    )


LINEAR_SITES = (
    *gemm(
        "fprop",
        f"{LINEAR}.forward",
        Anchor("torch.matmul(total_input, weight.t())", versions="<0.20"),
        Anchor("_linear_forward(total_input, weight, ...)", versions=">=0.20"),
        lhs="total_input",
        rhs="weight",
        owner="weight",
        then="save(ctx, input, weight, total_input)",
    ),
    # Operands saved for the backward pass may be packed.
    ReplaceExpression(f"{LINEAR}.backward", Anchor("ctx.saved_tensors"), "saved_operands(ctx)"),
    *gemm(
        "dgrad",
        f"{LINEAR}.backward",
        Anchor("grad_output.matmul(weight)"),
        lhs="grad_output",
        rhs="weight",
        owner="weight",
    ),
    *gemm(
        "wgrad",
        f"{LINEAR}.backward",
        Anchor("grad_output.t().matmul(total_input)"),
        Anchor(
            "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(total_input, grad_output, ...)"
        ),
        Anchor(
            "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(total_input, grad_output, ...)"
        ),
        Anchor("torch.matmul(grad_output.t(), total_input, ...)", versions=">=0.14"),
        Anchor("te_general_gemm(total_input, grad_output, ...)", versions=">=0.18,<0.20"),
        Anchor("_wgrad_gemm(weight.main_grad, grad_output, total_input)", versions=">=0.20"),
        Anchor(
            "_wgrad_gemm(sharded_weight.get_wgrad_tensor(), grad_output, total_input)",
            versions=">=0.20",
        ),
        lhs="grad_output",
        rhs="total_input",
        owner="weight",
    ),
)

ATTENTION_SITES = (
    *gemm(
        "qk",
        "DotProductAttention.forward",
        Anchor(
            "torch.baddbmm(matmul_input_buffer, query.transpose(0, 1),"
            " key.transpose(0, 1).transpose(1, 2), ...)"
        ),
        lhs="query",
        rhs="key",
        owner="self",
        # fused_attention branches off here, so one literal serves both paths.
        before=Anchor(
            "self.num_attention_heads_per_partition // self.num_query_groups_per_partition > 1"
        ),
    ),
    *gemm(
        "pv",
        "DotProductAttention.forward",
        Anchor("torch.bmm(attention_probs, value.transpose(0, 1))"),
        lhs="attention_probs",
        rhs="value",
        owner="self",
    ),
)

FILES = (
    FileEdits("megatron/core/tensor_parallel/layers.py", (IMPORT_SAVED, *LINEAR_SITES)),
    FileEdits("megatron/core/transformer/dot_product_attention.py", (IMPORT, *ATTENTION_SITES)),
)
