"""What an engine would do to a container, done to one command: another user, a root that is read-only, other mounts."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT

DOCKER = ROOT / "docker"
UID = 12345


def as_any_user(*command: str | Path) -> list[str]:
    """`command` as a user without a name or a home, who may read what root may (tests lie in root's folders)."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("another user id: needs root and setpriv")
    may_read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    user = [f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    return ["setpriv", *user, *may_read, "env", "-u", "HOME", "-u", "LOGNAME", "-u", "USER", *map(str, command)]


def in_own_mounts(setup: str, *command: str | Path) -> list[str]:
    """`command` after the shell commands `setup`, whose mounts nobody else sees."""
    if not _may_mount():
        pytest.skip("mount namespaces are not permitted here")
    return ["unshare", "--mount", "sh", "-ec", f'{setup}\nexec "$@"', "sh", *map(str, command)]


def read_only_root(writable: Path) -> str:
    """The setup of `in_own_mounts` for a root that is read-only, with a small file system at `writable`."""
    return f"mount -t tmpfs -o mode=1777 tmpfs {writable}\nmount -o remount,bind,ro /"


@cache
def _may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = ["unshare", "--mount", "sh", "-c", "mount -o remount,bind,ro /"]
    return subprocess.run(tried, capture_output=True, timeout=30).returncode == 0
