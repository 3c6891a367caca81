from __future__ import annotations

import pytest

from trainer.features.question_answering import squad

# prediction, accepted answers, exact match and F1 by the arithmetic of the official scripts
CASES = [
    ("The  cat!", ["a CAT"], 1, 1),
    ("big cat", ["the cat", "cats"], 0, 2 / 3),  # one word of two, and of one
    ("to be or not to be", ["to be"], 0, 2 * 2 / 8),  # words count as often as both have them
    ("dog", ["cat", "the dog"], 1, 1),
    ("", ["cat"], 0, 0),
    ("U.S.", ["us"], 1, 1),
    ("", [""], 1, 1),
    ("the", [""], 1, 1),
    ("cat", [""], 0, 0),
    ("the", ["a"], 1, 0),  # SQuAD 1.1 has no common word here
]


@pytest.mark.parametrize(("prediction", "accepted", "exact", "f1"), CASES)
def test_one_question(prediction, accepted, exact, f1):
    assert squad.exact_match([prediction], [accepted]) == 100 * exact
    assert squad.token_f1([prediction], [accepted]) == pytest.approx(100 * f1)


def test_means_over_all_answered_and_unanswered_questions():
    predictions, accepted = ["cat", "big dog", "bird", ""], [["cat"], ["dog"], [""], [""]]
    assert squad.exact_match(predictions, accepted) == 50
    assert squad.token_f1(predictions, accepted) == pytest.approx(100 * (1 + 2 / 3 + 0 + 1) / 4)
    assert squad.HAS_ANSWER_EXACT_MATCH.compute(predictions, accepted) == 50
    assert squad.HAS_ANSWER_F1.compute(predictions, accepted) == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert squad.NO_ANSWER_F1.compute(predictions, accepted) == 50
    assert squad.NO_ANSWER_F1.compute(["cat"], [["cat"]]) == 0


def test_squad_2_omits_answers_that_normalise_to_nothing():
    assert squad.accepted_answers(["the", "cat"], unanswerable=True) == ["cat"]
    assert squad.accepted_answers(["the"], unanswerable=True) == [""]
    assert squad.accepted_answers(["the"], unanswerable=False) == ["the"]
