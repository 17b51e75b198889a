"""A hand-patched tree in miniature: the convention's literals around GEMMs, in words of our own."""

import textwrap

LAYERS = "megatron/core/tensor_parallel/layers.py"
ATTENTION = "megatron/core/transformer/dot_product_attention.py"
LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"

FORWARD = """\
custom_quant_type = 'hifp8'  # of the product
if custom_quant_type == 'hifp8':
    return hif_matmul(total_input, weight.t())
return torch.matmul(total_input, weight.t())
"""
BACKWARD = """\
custom_quant_type = "mxfp8"
print('the input gradient')
dx = typed_matmul(grad_output, weight, custom_quant_type)
if ctx.wants_weight:
    custom_quant_type = 'none'

    # Between the literal and its product.
    dw = typed_matmul(grad_output.t(), total_input, custom_quant_type)
return dx, dw
"""
ATTEND = """\
custom_quant_type = 'mxfp4'
scores = typed_baddbmm(matmul_input_buffer, query, key, custom_quant_type)
attention_probs = self.softmax(scores)
custom_quant_type = 'bf16'
return typed_bmm(attention_probs, value, custom_quant_type)
"""
# What makes the class above the one that computes: a layer applies it.
LAYER = f"""
def multiply(*operands):
    return {LINEAR}.apply(*operands)

class RowParallelLinear(Module):
    def forward(self, x):
        return multiply(x, self.weight)
"""


def method(name, arguments, body):
    """A method of a class; its body starts on the line behind."""
    return f"    def {name}({arguments}):\n" + textwrap.indent(textwrap.dedent(body), " " * 8)


def layers(forward=FORWARD, backward=BACKWARD):
    """Two lines before the class; the body of `forward` starts on line 5."""
    parts = [
        "import torch\n\n",
        f"class {LINEAR}(Function):\n",
        method("forward", "ctx, total_input, weight", forward),
        "\n",
        method("backward", "ctx, grad_output, total_input, weight", backward),
        LAYER,
    ]
    return "".join(parts)


def attention(body=ATTEND):
    """The body of `forward` starts on line 3."""
    return "class DotProductAttention:\n" + method("forward", "self, query, key, value", body)


def write(root, contents):
    """A tree at `root` of {path: text or bytes}."""
    for path, content in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def read(root):
    """{path: bytes} of the two files of a tree."""
    return {path: (root / path).read_bytes() for path in (LAYERS, ATTENTION)}
