"""A program of the tests: how far a checkpoint's logits are from those of transformers.

    python convert_logits.py TREE HF_FOLDER CHECKPOINT RESULT MEGATRON_FLAGS...

RESULT gets {"difference", "largest"}, absolute, and "rows", the embedding's. With --save, what was
loaded is saved as a training saves it: its arguments know the padded vocabulary alone.
"""

import json
import sys
from pathlib import Path

import torch


def main(tree: str, hf: str, checkpoint: str, result: str, flags: list[str]) -> None:
    """Compare on fixed random tokens, in fp32."""
    sys.path.insert(0, str(Path(tree) / "tools"))
    import convert
    from transformers import AutoModelForCausalLM

    convert.use_cpu()
    args, model = convert.load([*flags, "--load", checkpoint])
    reference = AutoModelForCausalLM.from_pretrained(
        hf, dtype=torch.float32, attn_implementation="eager"
    )
    size = reference.config.vocab_size
    tokens = torch.randint(0, size, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.eval()(tokens, torch.arange(64).expand(2, -1), None)
        theirs = reference.eval()(tokens).logits
    rows = convert.unwrapped(model).embedding.word_embeddings.weight.shape[0]
    facts = {
        "difference": (ours[..., :size] - theirs).abs().max().item(),
        "largest": theirs.abs().max().item(),
        "rows": rows,
    }
    Path(result).write_text(json.dumps(facts))
    if args.save:
        from megatron.training.checkpointing import save_checkpoint

        args.vocab_size, args.padded_vocab_size = None, rows
        save_checkpoint(1, [model], None, None, 0)


if __name__ == "__main__":
    main(*sys.argv[1:5], sys.argv[5:])
