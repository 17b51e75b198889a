"""The overlay: vendor upstream, patch it structurally, show what changed, and undo it exactly.

Reading order: `transaction` (all files or none), `records` and `tree` (the files on disk), `series`
(what to change), `edits` and `codemod` (how a change is written), `find` and `rewrite` (edits of
one file), `drift` (the report if a patch does not fit), `plan` (the series on all files, in
memory), `goal` (what a tree should hold), `apply` (apply and restore), `vendor` and `checkout`
(where upstream comes from), then `status`, `diff`, `patch_files` and `snapshot`, which change no
tree. The folder `verify` tries the series on other releases, and `quant_types` shows and sets only
the quant types.
"""
