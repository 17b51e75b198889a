"""Tokenize JSON lines into the .bin/.idx pair that Megatron's datasets read.

    .venv/bin/python Megatron-LM/tools/preprocess_data.py \\
        --input text.jsonl --output-prefix data/mine --workers 8 \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/ --append-eod

writes data/mine_text_document.bin and .idx; training takes `--data-path data/mine_text_document`.
The flags are those of upstream's tool of this name. This process is replaced by one of mqo that
imports the Megatron of this tree.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    tree = Path(__file__).resolve().parents[1]
    # The library of the checkout that contains this file, if it is in one.
    folders = (str(tree.parent / "tools"), str(tree), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, folders))
    command = [sys.executable, "-P", "-W", "ignore", "-m", "mqo.data.preprocess", *sys.argv[1:]]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})
