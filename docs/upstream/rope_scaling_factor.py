"""--rope-scaling-factor does not arrive at the model: it always scales by 8.

Ends with exit code 1 if it does not. It needs no GPU.
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
print(f"asked for: {args.rope_scaling_factor}; the model's: {model.rope_scaling_factor}")
sys.exit(model.rope_scaling_factor != args.rope_scaling_factor)
