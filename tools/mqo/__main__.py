"""`python -m mqo`, and the program `mqo`."""

import sys

from mqo import process
from mqo.data import allocator


def main() -> None:
    """Run the command line; one that tokenizes begins with another allocator, if there is one."""
    # Before anything is imported that a new start would have to import again.
    if sys.argv[1:3] == ["data", "prepare"]:
        allocator.preload()
    with process.command():
        from mqo import cli

        cli.main()


if __name__ == "__main__":
    main()
