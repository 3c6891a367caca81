from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ROOT / "recipes" / "sample" / "tokenizer")


@pytest.fixture(autouse=True, scope="session")
def own_datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    import datasets

    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
