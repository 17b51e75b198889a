"""Choose layouts over GPUs, and compute the memory of one GPU from a model's sizes."""
