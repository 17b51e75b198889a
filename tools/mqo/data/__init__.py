"""Datasets for training: text, a tokenizer, and the index that Megatron reads.

`prepare.prepare` makes a dataset ready, once; `index.check_prefix` looks at one that the user
brings. Nothing here imports torch or Megatron: indexing is a program of its own, run on the
vendored tree.
"""
