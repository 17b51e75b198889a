"""What is done with a trained model beside training on: distillation, evaluation, generation.

And post-training quantization, and export. Some of its modules import ModelOpt, which takes
seconds: import them only where they are asked for.
"""
