"""BART (Lewis et al. 2020, arXiv:1910.13461).

Its layers call torch's dropout as a function, which has no keyed form, so it trains with
`training.layout_invariant_dropout` false, which tensor parallelism excludes.
"""

from __future__ import annotations

from trainer.models.families.family import ModelFamily

BART = ModelFamily("bart", layers="(encoder|decoder).layers.*", tensor=None)
