"""Files that tools write for the user."""

from __future__ import annotations

import pytest

from trainer.base.errors import UsageError
from trainer.tools.writing import write_over


def test_a_file_for_the_user_gets_its_folder_and_replaces_another(tmp_path):
    file = tmp_path / "new" / "page.html"
    for text in ("one", "two"):
        write_over(file, text, "--output")
        assert file.read_text() == text
    with pytest.raises(UsageError, match=r"page.html/x cannot be written: .*; make room, or name another by --output"):
        write_over(file / "x", "three", "--output")
