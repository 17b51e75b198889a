"""Knowledge distillation: layers, losses and their balance."""
