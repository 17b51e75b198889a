"""Run tasks of lm-evaluation-harness on a saved model.

Only this package imports the harness, and it is imported only for tasks.
"""
