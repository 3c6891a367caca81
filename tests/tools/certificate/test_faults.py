"""Planted faults: a certificate names the first tensor that differs, its pass, and the cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.features.fingerprints.recorded import record
from tests.helpers.ranks import RankPools
from tests.tools.certificate.faults import FAULTS, Planted, sections_of
from trainer.tools.certificate.certifying import beside
from trainer.tools.certificate.recording import Recording, read_recording
from trainer.tools.certificate.result import LayoutResult


def recorded(
    ranks: RankPools, folder: Path, sections: dict[str, Any], number: int, name: str | None = None
) -> Recording:
    ranks(number).run(record_planted, folder, sections, name)
    return read_recording(folder)


def record_planted(folder: Path, sections: dict[str, Any], name: str | None) -> None:
    record(folder, sections, 2, None if name is None else FAULTS[name].plant)


@pytest.fixture(scope="module")
def references() -> dict[str, Recording]:
    return {}


def result_of(
    name: str | None, fault: Planted, ranks: RankPools, references: dict[str, Recording], folder: Path
) -> LayoutResult:
    plain = sections_of(fault, of_layout=False)
    key = json.dumps(plain, sort_keys=True)
    if key not in references:
        references[key] = recorded(ranks, folder / "reference", plain, 1)
    run = recorded(ranks, folder / "layout", sections_of(fault, of_layout=True), fault.ranks, name)
    return beside("layout", fault.ranks, run, references[key])


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, ranks: RankPools, references: dict[str, Recording], tmp_path: Path):
    fault = FAULTS[name]
    result = result_of(name, fault, ranks, references, tmp_path)
    assert result.comparison is not None
    first = result.comparison.first
    assert first is not None, "no difference is found"
    assert (first.step, first.place, first.name) == (1, fault.place, fault.name), result.sentence()
    assert fault.cause in result.cause
    assert fault.rank in (None, first.rank)


@pytest.mark.parametrize(
    "name",
    [
        "a missing sum of a bias",
        "a stage that skips a residual",
        "tf32 on one rank",
        "an adapter's scale",
        "one expert of two",
    ],
)
def test_the_layout_without_its_fault_is_equal(
    name: str, ranks: RankPools, references: dict[str, Recording], tmp_path: Path
):
    result = result_of(None, FAULTS[name], ranks, references, tmp_path)
    assert result.is_equal, result.sentence()
    assert result.comparison is not None
    assert not result.comparison.not_compared
    assert len(result.comparison.profile) > 30
