"""Layouts over GPUs, and the memory of one GPU, computed from a model's sizes."""
