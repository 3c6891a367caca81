"""The table of planted defects fits the source; `make plant` runs it."""

from __future__ import annotations

from collections import Counter

from tests.planted.defect import ROOT, Defect
from tests.planted.table import DEFECTS


def _exists(test: str) -> bool:
    return (ROOT / "tests" / test.partition("::")[0]).is_file()


def _is_sound(defect: Defect) -> bool:
    return defect.occurrences() == 1 and defect.old != defect.new and all(map(_exists, defect.tests))


def test_every_anchor_occurs_once_and_every_file_of_tests_exists():
    """Where code moved, mend the row in `tests/planted/table.py`."""
    assert [defect.name for defect in DEFECTS if not _is_sound(defect)] == []


def test_names_are_used_once():
    assert [name for name, count in Counter(defect.name for defect in DEFECTS).items() if count > 1] == []


def test_every_package_has_defects():
    packages = {path.parent.name for path in ROOT.glob("trainer/*/__init__.py")}
    assert packages == {defect.package for defect in DEFECTS}
    assert len(DEFECTS) >= 40
