"""Tasks of lm-evaluation-harness on a saved model: which ones, and how the model answers them.

Its package is imported only here, and only for tasks.
"""
