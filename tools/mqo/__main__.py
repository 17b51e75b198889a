"""`python -m mqo`."""

from mqo.cli import main

main()
