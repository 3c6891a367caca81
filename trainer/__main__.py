"""The program that `trainer` and `python -m trainer` start."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line; Ctrl-C while the first modules are imported is no more than Ctrl-C later."""
    try:
        from trainer.cli import main as command_line

        return command_line()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
