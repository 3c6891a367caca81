from __future__ import annotations

import numpy as np
import pytest

from trainer.features.token_classification.entities import continuation, scheme_of, tags_of_span

IOB2 = ["O", "B-A", "I-A", "B-B", "I-B"]
IOBES = ["O", "B-A", "I-A", "E-A", "S-A", "B-B", "I-B", "E-B", "S-B"]


def found(names: list[str], *rows: str) -> list[tuple[int, int, str]]:
    """Return the entities of rows of tags, which are separated by spaces."""
    scheme = scheme_of(names)
    assert scheme is not None
    tags = [row.split() for row in rows]
    first = [place == 0 for row in tags for place in range(len(row))]
    entities = scheme.entities(np.array([names.index(tag) for row in tags for tag in row]), np.array(first))
    types = [scheme.types[kind] for kind in entities.type]
    return list(zip(entities.start.tolist(), entities.end.tolist(), types, strict=True))


def test_an_entity_ends_with_its_row_at_another_type_and_at_a_begin():
    assert found(IOB2, "B-A I-A I-B B-B", "I-B O I-A I-A") == [
        (0, 2, "A"),
        (2, 3, "B"),
        (3, 4, "B"),
        (4, 5, "B"),
        (6, 8, "A"),
    ]


def test_single_and_end_close_an_entity():
    assert found(IOBES, "S-A S-A B-A I-A E-A I-A E-A E-B") == [
        (0, 1, "A"), (1, 2, "A"), (2, 5, "A"), (5, 7, "A"), (7, 8, "B"),
    ]  # fmt: skip


def test_a_word_without_prediction_is_in_no_entity():
    scheme = scheme_of(IOB2)
    assert scheme is not None
    entities = scheme.entities(np.array([1, -1, 2]), np.array([True, False, False]))
    assert (entities.start.tolist(), entities.end.tolist()) == ([0, 2], [1, 3])


@pytest.mark.parametrize(
    ("names", "f1", "precision", "recall", "of_types"),
    [
        (IOB2, 0.8026030368763557, 0.8001730103806228, 0.8050478677110531, [0.8057676, 0.79928952]),
        (IOBES, 0.8404025880661395, 0.8416126709863211, 0.8391959798994975, [0.84565686, 0.83513319]),
    ],
)
def test_counts_give_the_figures_of_seqeval(names, f1, precision, recall, of_types):
    """The figures are those of seqeval 1.2.2 for the same random rows, many of them not well-formed."""
    random = np.random.default_rng(0)
    true, predicted, first = [], [], []
    for length in random.integers(0, 12, 300):
        tags = random.integers(0, len(names), length)
        same = random.random(length) < 0.8
        predicted.extend(np.where(same, tags, random.integers(0, len(names), length)))
        true.extend(tags)
        first.extend(place == 0 for place in range(length))
    scheme = scheme_of(names)
    assert scheme is not None
    is_first = np.array(first)
    right, num_predicted, num_true = scheme.counts(
        scheme.entities(np.array(predicted), is_first), scheme.entities(np.array(true), is_first)
    )
    assert right.sum() / num_predicted.sum() == pytest.approx(precision, rel=1e-12)
    assert right.sum() / num_true.sum() == pytest.approx(recall, rel=1e-12)
    assert 2 * right.sum() / (num_predicted.sum() + num_true.sum()) == pytest.approx(f1, rel=1e-12)
    assert 2 * right / (num_predicted + num_true) == pytest.approx(of_types, abs=1e-8)


@pytest.mark.parametrize("names", [["NOUN", "VERB"], ["O", "B-A", "X"], ["B", "I", "O"], ["O"]])
def test_other_tags_are_plain(names):
    assert scheme_of(names) is None


def test_tags_of_spans_and_of_further_tokens():
    assert tags_of_span("A", 3, IOB2) == ["B-A", "I-A", "I-A"]
    assert tags_of_span("A", 3, IOBES) == ["B-A", "I-A", "E-A"]
    assert (tags_of_span("A", 1, IOB2), tags_of_span("A", 1, IOBES)) == (["B-A"], ["S-A"])
    assert [continuation(tag, IOBES) for tag in IOBES[:5]] == ["O", "I-A", "I-A", "E-A", "I-A"]
    assert continuation("B-A", ["O", "B-A"]) == "B-A"
