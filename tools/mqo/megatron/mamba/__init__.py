"""Mamba-2 in plain torch, for machines without the kernels of mamba_ssm and causal_conv1d."""
