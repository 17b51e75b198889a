"""Uses of a trained model other than more training: distillation, evaluation, generation.

Also post-training quantization, and export. Some modules import ModelOpt, which takes seconds:
import them only when they are needed.
"""
