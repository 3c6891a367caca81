"""BERT (Devlin et al. 2019, arXiv:1810.04805) and encoders with the same modules."""

from __future__ import annotations

from dataclasses import replace

from trainer.models.families.family import LayerStack, ModelFamily, StagePlan, TensorPlan
from trainer.models.families.residuals import dense_then_norm

_LAYERS = "encoder.layer.*"


def _like_bert(model_type: str, *, vocabulary_heads: tuple[str, ...], whole: tuple[str, ...]) -> ModelFamily:
    """Return the family of an encoder with BERT's modules and its own heads."""
    return ModelFamily(
        model_type,
        layers=_LAYERS,
        padding_free=True,
        tensor=TensorPlan(
            columns={f"{_LAYERS}.(attention.self.(query|key|value)|intermediate.dense)": 1},
            rows=(f"{_LAYERS}.(attention.output|output).dense",),
            attention=(f"{_LAYERS}.attention.self",),
            shared_inputs=(f"{_LAYERS}.attention.self",),
            embeddings=("embeddings.word_embeddings",),
            vocabulary_heads=vocabulary_heads,
            whole=("embeddings.position_embeddings", "embeddings.token_type_embeddings", "qa_outputs", *whole),
            sequence_parallel=True,
            context_parallel=True,
        ),
        stages=StagePlan((LayerStack(_LAYERS, before=("embeddings", "embeddings_project")),)),
        residual_outputs={f"{_LAYERS}.(attention.output|output)": dense_then_norm},
    )


BERT = _like_bert(
    "bert",
    vocabulary_heads=("cls.predictions.decoder",),
    whole=("pooler.dense", "classifier", "cls.predictions.transform.dense", "cls.seq_relationship"),
)
# Liu et al. 2019 (arXiv:1907.11692)
ROBERTA = _like_bert(
    "roberta",
    vocabulary_heads=("lm_head.decoder",),
    whole=("pooler.dense", "classifier", "classifier.dense", "classifier.out_proj", "lm_head.dense"),
)
# Conneau et al. 2020 (arXiv:1911.02116)
XLM_ROBERTA = replace(ROBERTA, model_type="xlm-roberta")
# Clark et al. 2020 (arXiv:2003.10555)
ELECTRA = _like_bert(
    "electra",
    vocabulary_heads=("generator_lm_head",),
    whole=(
        "embeddings_project",
        "classifier",
        "classifier.dense",
        "classifier.out_proj",
        "sequence_summary.summary",
        "generator_predictions.dense",
        "discriminator_predictions.dense",
        "discriminator_predictions.dense_prediction",
    ),
)
