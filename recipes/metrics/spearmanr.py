"""Correlation of the ranks of scores."""

from typing import Any

import datasets
import evaluate
from scipy.stats import spearmanr


class Spearmanr(evaluate.Metric):
    """Correlation of the ranks of scores."""

    def _info(self) -> evaluate.MetricInfo:
        features = {name: datasets.Value("float32") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description=__doc__, citation="", inputs_description="", features=datasets.Features(features)
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"spearmanr": float(spearmanr(references, predictions).statistic)}
