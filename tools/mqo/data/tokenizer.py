"""A small byte-level BPE tokenizer trained on the data: no download, any text round-trips."""

import json
from collections.abc import Iterator
from pathlib import Path

END_OF_DOCUMENT = "<|endoftext|>"
# A separate token: Megatron masks the padding id out of the loss, and must not mask document ends.
PADDING = "<|padding|>"
DEFAULT_VOCAB_SIZE = 4096


def train(texts: Iterator[str], folder: Path, vocab_size: int) -> int:
    """Train on `texts`, write tokenizer.json and tokenizer_config.json, and return the entries.

    There are `vocab_size` entries, or fewer if the texts yield no more.

    transformers' AutoTokenizer opens the folder, and so does Megatron's
    `--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER`. Id 0 ends a document, id 1 is
    padding. The same texts give the same files, byte for byte.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = [END_OF_DOCUMENT, PADDING]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    # The names of the special tokens, which AutoTokenizer also needs.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,  # the default would eat spaces before punctuation
        # A document is longer than any context; without a limit, transformers does not warn of it.
        "model_max_length": 10**9,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return bpe.get_vocab_size()
