"""Quantize Transformer Engine's linear layers through its quantizer factory.

Upstream's `--fp8-recipe custom --fp8-quantizer-factory` names `factory.quantizer`; Transformer
Engine is not patched. The literals in upstream's linear layers define the types, and the same code
as at the sites quantizes the operands. Importing this package does not import Transformer Engine.
"""
