"""Mean over classes of the F1 score."""

from typing import Any

import datasets
import evaluate
from sklearn.metrics import f1_score


class F1(evaluate.Metric):
    """Mean over classes of the F1 score."""

    def _info(self) -> evaluate.MetricInfo:
        features = {name: datasets.Value("int32") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description=__doc__, citation="", inputs_description="", features=datasets.Features(features)
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"f1": float(f1_score(references, predictions, average="macro"))}
