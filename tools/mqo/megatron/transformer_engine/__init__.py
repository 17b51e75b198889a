"""Quantizes Transformer Engine's linear layers through the quantizer factory that they ask.

Upstream's `--fp8-recipe custom --fp8-quantizer-factory` names `factory.quantizer`; nothing of
Transformer Engine is patched. The literals in upstream's linear layers stay the truth for types,
and what quantizes an operand is what quantizes it at the sites. Importing this package does not
import Transformer Engine.
"""
