"""Turn a run configuration into a command and a run folder. Every training starts here."""
