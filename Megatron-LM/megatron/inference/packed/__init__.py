"""Trained weights as codes and scales, in layouts that other programs read."""
