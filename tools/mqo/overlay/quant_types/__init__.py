"""script/quant_type_modifier.py: shows and sets the quant types, in hand-patched trees, too.

`modifier` has the three commands. They find a site's literals with `sites`, which asks `gemms` what
the GEMMs of a function read; `ledger` keeps what was before.
"""
