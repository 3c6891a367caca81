"""Scripts that made rows of a sample: they make the same bytes again."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT


def assert_makes_again(script: Path, sample: Path, folder: Path) -> None:
    """Run a copy of a script in `folder`, beside a copy of the texts of the sample, and compare its rows."""
    if sys.version_info[:3] != (3, 11, 7):
        pytest.skip("made with Python 3.11.7")
    here, made = folder / script.relative_to(ROOT).parent, folder / sample.relative_to(ROOT)
    for new in (here, made, folder / "recipes"):
        new.mkdir(parents=True)
    shutil.copytree(ROOT / "recipes" / "sample", folder / "recipes" / "sample")
    subprocess.run([sys.executable, shutil.copy(script, here)], check=True, timeout=120)
    for name in ("train.jsonl", "validation.jsonl"):
        assert (made / name).read_bytes() == (sample / name).read_bytes()
