from __future__ import annotations

import pytest

from tests.tools.predict.test_predicting_texts import assert_turn_ends

TASK = {"type": "preference", "prompt": "asked", "chosen": "answer", "rejected": "worse", "loss": {"type": "orpo"}}


@pytest.mark.slow
def test_an_answer_ends_with_its_turn_in_predictions_and_in_the_folder(tmp_path, capfd):
    assert_turn_ends({**TASK, "metrics": ["reward_accuracy"]}, tmp_path, capfd)
