"""A file with a number format of a user."""

FILE = """
[elements]
e3m3 = { bits = 7, mantissa_bits = 3 }
[formats.own7]
element = "e3m3"
scale = "e8m0"
block = 32
"""
