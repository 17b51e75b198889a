"""The overlay: vendor upstream, patch it structurally, show what changed, and undo it exactly.

Reading order: `tree` (what lies on disk), `series` (what is to be changed), `edits` and `sweep`
(the two vocabularies of change), `find` and `rewrite` (edits on one file), `plan` (the series on a
whole tree, in memory), `apply` (the plan on disk), then `status`, `diff` and `snapshot`, which only
read, and `verify`, which tries all of it on other releases. `drift` is what is said when a patch
does not fit.
"""
