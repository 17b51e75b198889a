"""`mqo verify`: try the patch series on other upstream releases, in temporary trees.

`release` tries one of them; `source` checks what the patches wrote, `forward` runs a small model,
`table` shows the results.
"""
