"""`python -m doublehead.cli`, the same as the command `doublehead`."""

from doublehead.cli import app

if __name__ == "__main__":
    app()
