"""Layouts for so many GPUs, and the memory of one of them, computed from a model's sizes."""
