"""Entry point of the ``convt3d`` command and of ``python -m convt3d``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say in one sentence which extra it needs."""
    try:
        from convt3d.cli import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit(
            f"The convt3d command needs {error.name}, which is not installed: "
            "pip install 'convt3d[cli]'."
        )
    app()


if __name__ == "__main__":
    main()
