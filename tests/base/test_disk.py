"""Files that others may read, and folders that replace others."""

from __future__ import annotations

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.base.disk import numbered_errors, open_plain, read_plain, replace_folder, replace_text, save_tensors


def test_an_error_in_rust_has_the_number_of_the_system(tmp_path):
    with pytest.raises(OSError, match="No such file or directory") as caught, numbered_errors():
        save_file({"a": torch.zeros(3)}, tmp_path / "none" / "a.safetensors")
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(ValueError, match="os error"), numbered_errors():
        raise ValueError("no number of an os error")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_tensors_have_the_permissions_of_other_files(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        save_tensors({"weight": torch.ones(2)}, tmp_path / "file.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file.safetensors").stat().st_mode) == mode
    assert torch.equal(load_file(tmp_path / "file.safetensors")["weight"], torch.ones(2))


@pytest.mark.parametrize("was_there", [True, False])
def test_a_folder_replaces_another(tmp_path, was_there):
    new, place = tmp_path / "new", tmp_path / "place"
    _write(new, "new")
    if was_there:
        _write(place, "old")
        (place / "only in the old one").touch()
    replace_folder(new, place)
    assert [(path.name, path.read_text()) for path in place.iterdir()] == [("file", "new")]
    assert os.listdir(tmp_path) == ["place"]


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    replace_text(tmp_path / "file", "old")
    monkeypatch.setattr("trainer.base.disk.sync", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_several_writers_of_one_file_write_it_whole(tmp_path):
    texts = [f"{number}\n" * 2000 for number in range(40)]
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda text: replace_text(tmp_path / "file", text, alone=False), texts))
    assert (tmp_path / "file").read_text() in texts
    assert os.listdir(tmp_path) == ["file"]


def test_opens_regular_files_only_and_hard_links_read_only(tmp_path):
    (tmp_path / "file").write_text("text")
    os.link(tmp_path / "file", tmp_path / "hard")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    assert read_plain(tmp_path / "hard", 3) == b"tex"
    for name, flags in (("hard", os.O_RDWR), ("link", os.O_RDONLY), ("pipe", os.O_RDONLY), ("folder", os.O_RDONLY)):
        with pytest.raises(OSError, match="it is a link or no regular file"):
            open_plain(tmp_path / name, flags)


def _write(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "file").write_text(text)
