"""script/quant_type_modifier.py: show and set the quant types, also in hand-patched trees.

`modifier` has the three commands. They find a site's literals with `sites`, which gets from `gemms`
what the GEMMs of a function read; `ledger` keeps the earlier content.
"""
