"""Correlation of scores."""

from typing import Any

import datasets
import evaluate
from scipy.stats import pearsonr


class Pearsonr(evaluate.Metric):
    """Correlation of scores."""

    def _info(self) -> evaluate.MetricInfo:
        features = {name: datasets.Value("float32") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description=__doc__, citation="", inputs_description="", features=datasets.Features(features)
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"pearsonr": float(pearsonr(references, predictions).statistic)}
