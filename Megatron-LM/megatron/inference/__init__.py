"""What is done with a trained model beside training on: knowledge distillation.

Its modules import ModelOpt, which takes seconds: import them only where they are asked for.
"""
