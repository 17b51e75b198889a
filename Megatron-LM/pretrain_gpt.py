"""Pre-train a GPT with upstream's trainer and flags.

The program is in megatron.inference.gpt: pretraining.py has the loss and the forward step,
batches.py the data, model_provider.py the model.
"""

# First, for its check: no other megatron may be imported instead of this tree's.
import preflight  # isort: skip

preflight.disable_gc(__name__)
preflight.check_origin(("megatron.inference",))

from megatron.inference.gpt.pretraining import main

if __name__ == "__main__":
    main(preflight.PROGRAM_START)
