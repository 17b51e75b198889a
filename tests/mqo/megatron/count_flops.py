"""Upstream's FLOPs of a step of some models.

    python tests/mqo/megatron/count_flops.py Megatron-LM JOBS > FLOPS

The file JOBS is a JSON list of lists of Megatron's flags; FLOPS has a number for each.
test_flops.py judges.
"""

import contextlib
import json
import os
import sys
from pathlib import Path


def main():
    jobs = json.loads(Path(sys.argv[2]).read_text())
    with contextlib.redirect_stdout(sys.stderr):  # upstream prints its arguments
        sys.path.insert(0, str(Path(sys.argv[1]).resolve()))
        os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "WORLD_SIZE": "1", "RANK": "0"}
        import preflight  # noqa: F401  (checks where megatron comes from)

        counts = [count(flags) for flags in jobs]
    print(json.dumps(counts))


def count(flags):
    from megatron.training import arguments, training
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    sys.argv[1:] = flags
    args = arguments.parse_args()
    arguments.validate_args(args)
    args.padded_vocab_size = calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, 1
    )
    return training.num_floating_point_operations(args, args.micro_batch_size)


if __name__ == "__main__":
    main()
