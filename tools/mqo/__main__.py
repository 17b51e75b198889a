"""`python -m mqo`, and the program `mqo`."""

from mqo import process


def main() -> None:
    """Run the command line."""
    with process.command():
        from mqo import cli

        cli.main()


if __name__ == "__main__":
    main()
