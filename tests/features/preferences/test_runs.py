"""Runs and evaluations of preferences, as a user starts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.helpers.tiny_run import write_tiny_run
from tests.helpers.training import TINY_DECODERS
from trainer.cli import main
from trainer.data.cache import open_entry

DECODER = {**TINY_DECODERS["llama"], "vocab_size": 120, "attention_dropout": 0.5}


def test_an_evaluation_has_the_reference_of_the_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The reference has no dropout and no adapter; layers without padding compute it too."""
    start = tmp_path / "start"
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)).eval()
    model.save_pretrained(start)
    file = write_tiny_run(
        tmp_path,
        task={"type": "preference", "metrics": ["reward_margin", "reward_accuracy", "chosen_logps"]},
        model={"adapter": {"type": "lora", "dropout": 0.3}, "name_or_path": str(start), "dropout": 0.3},
        data={"padding_free": True},
        optimizer={"learning_rate": 0.03},
    )
    recipe = json.loads(file.read_text())
    del recipe["task"]["text"], recipe["model"]["config"]
    file.write_text(json.dumps(recipe))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.eos_token = "[SEP]"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for name in ("train", "validation"):
        texts = [json.loads(line)["text"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        rows = [{"prompt": "word1 word2", "chosen": f" {text}", "rejected": " word3"} for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["run", str(file)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [line["eval"] for line in lines if "eval" in line][-1]
    assert last["reward_margin"] > 0.05

    places = [place for place in (tmp_path / "cache").glob("reference-*") if place.is_dir()]
    entries = [open_entry(place, verify=True) for place in places]
    kept = {len(entry.arrays["reference"]): entry.arrays["reference"] for entry in entries}
    ids = tokenizer(f"word1 word2 {texts[0]}", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        scores = model(input_ids=ids).logits.log_softmax(-1)[0, :-1]
    places = torch.arange(2, ids.shape[1] - 1)  # the class token and the prompt come before
    assert kept[len(texts)][0, 0] == pytest.approx(float(scores[places, ids[0, places + 1]].sum()), abs=1e-4)

    (tmp_path / "train.jsonl").unlink()
    capfd.readouterr()
    for keys in ([], ["data.padding_free=false", f"data.cache={tmp_path / 'other'}"]):
        assert main(["evaluate", str(tmp_path / "run" / "model"), "--json", *keys]) == 0
        assert json.loads(capfd.readouterr().out)["metrics"] == pytest.approx(last, abs=1e-5)

    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(start)
    assert main(["evaluate", str(tmp_path / "run" / "model"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["metrics"]["reward_margin"] != pytest.approx(last["reward_margin"], 1e-2)
