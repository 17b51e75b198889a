"""Recipes: how each operand of the linear layers' GEMMs is quantized, layer by layer."""
