"""What is done with a trained model beside training on: distillation, evaluation, generation.

Its modules import ModelOpt, which takes seconds: import them only where they are asked for.
"""
