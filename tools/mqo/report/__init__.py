"""Runs in, pictures out."""
