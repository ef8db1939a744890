"""Part of the predictions that are right."""

from typing import Any

import datasets
import evaluate
from sklearn.metrics import accuracy_score


class Accuracy(evaluate.Metric):
    """Part of the predictions that are right."""

    def _info(self) -> evaluate.MetricInfo:
        features = {name: datasets.Value("int32") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description=__doc__, citation="", inputs_description="", features=datasets.Features(features)
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(accuracy_score(references, predictions))}
