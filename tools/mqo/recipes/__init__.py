"""Read and show recipes: how each operand of the linear layers' GEMMs is quantized."""
