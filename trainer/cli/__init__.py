"""The command line: verbs, arguments and exit codes.

Each verb has a file, which parses and prints. A verb imports heavy packages only when it needs them: `run` and `export`
import torch, and `check` and `doctor` do for data and models on this machine, after the recipe was found valid.
`doctor` asks torch about GPUs in another process.
"""

from trainer.cli.program import main

__all__ = ["main"]
