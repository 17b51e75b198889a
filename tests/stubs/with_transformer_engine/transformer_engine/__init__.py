raise OSError("Could not find the compiled library of Transformer Engine")
