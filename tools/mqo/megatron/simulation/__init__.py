"""One rank of a training step on tensors without data: its memory, products and collectives.

`mqo simulate` runs it through tools/simulate.py. Upstream's own program runs, patched and with the
run's quant types. Only code that needs data, a GPU or another process is replaced.
"""
