"""Datasets for training: text, a tokenizer, and the index that Megatron reads.

`prepare.prepare` makes a named dataset's sample ready, once; `pipeline.index` indexes a corpus of
any size; `pair_check.check_prefix` checks an index that the user brings. Nothing here imports
torch or Megatron.
"""
