"""BERT (Devlin et al. 2019, arXiv:1810.04805)."""

from __future__ import annotations

from trainer.models.families.family import ModelFamily

BERT = ModelFamily(model_type="bert", layers="encoder.layer.*")
