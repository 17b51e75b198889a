"""--rope-scaling-factor does not reach the model, which always scales by 8.

The function that turns flags into the model's configuration leaves it out. Llama 3.2 needs 32.
Exits with 1 if the bug is there. It needs no GPU.
"""

import sys
from argparse import ArgumentParser

from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import add_megatron_arguments

FLAGS = """
    --num-layers 1 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64
    --no-rope-fusion --use-rope-scaling --rope-scaling-factor 32
"""
args = add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args(FLAGS.split())
args.params_dtype, args.padded_vocab_size = None, 64  # as validate_args sets them
model = gpt_config_from_args(args)
print(f"flag: {args.rope_scaling_factor}; model: {model.rope_scaling_factor}")
sys.exit(model.rope_scaling_factor != args.rope_scaling_factor)
