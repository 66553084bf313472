"""``napscribe`` and ``python -m gateway``: the server keeps its imports small, so that must be said before the first."""

from __future__ import annotations

import sys


def main() -> int:
    """Entry point of the console script; returns the exit code."""
    if sys.argv[1:2] == ["serve"]:
        from gateway import lean

        lean.postpone()
    from gateway.cli import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
