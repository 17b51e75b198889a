"""script/quant_type_modifier.py: shows and sets the quant types, in hand-patched trees, too.

`modifier` has the three commands. They find a site's literals with `foreign`, which asks `gemms`
what is a GEMM and whose, `reach` which literal reaches it, and `plain` where its bytes are;
`ledger` keeps what was before.
"""
