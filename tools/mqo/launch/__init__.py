"""Turns a run's configuration into a command and a run folder: all training starts here."""
