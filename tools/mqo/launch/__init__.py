"""Turns a cell of the matrix into a command and a run folder: all training starts here."""
