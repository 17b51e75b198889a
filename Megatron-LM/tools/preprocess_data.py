"""Tokenize JSON lines into the .bin/.idx pair that Megatron's datasets read.

    .venv/bin/python Megatron-LM/tools/preprocess_data.py \\
        --input text.jsonl --output-prefix data/mine --workers 8 \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/ --append-eod

writes data/mine_text_document.bin and .idx; training takes `--data-path data/mine_text_document`.
The flags are those of upstream's tool of this name. This process becomes one of mqo's that finds
this tree's Megatron.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    tree = Path(__file__).resolve().parents[1]
    # The library of the checkout that this file lies in, where it lies in one.
    places = (str(tree.parent / "tools"), str(tree), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, places))
    command = [sys.executable, "-P", "-W", "ignore", "-m", "mqo.data.preprocess", *sys.argv[1:]]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})
