"""The card of a fine-tuned model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_primal.convert.hub import public_command, public_name
from hf_primal.model_cards.front_matter import hub_link, is_hub_id, pipeline_tag, render, results

TRAINED = {
    "primal": "the Primal-Attention parameters and the head",
    "primal+lora": "the Primal-Attention parameters and the head in full, the rest by LoRA",
    "replaced-layers": "the layers with Primal-Attention, whole, and the head",
    "all": "every parameter",
}
UNTOLD = ("runtime", "samples_per_second", "steps_per_second", "epoch", "model_preparation_time")  # not of the model


@dataclass(frozen=True)
class FineTuning:
    """What a card says of a fine-tuning run.

    Attributes:
        title: what the model is called: its folder's name.
        auto_class: the Auto class that loads it.
        base_model: hub id or folder of the converted model that training began with; None if unknown.
        task: e.g. "sequence-classification".
        dataset: hub id, file or folder.
        metrics: of the best evaluation; an "eval_" before a name is dropped.
        teacher_metrics: of the unconverted model trained likewise, under the same names; None if there is none.
        trained: "primal", "primal+lora", "replaced-layers" or "all".
        stages: what was done, in order, a line each.
        primal_layers: indices of the replaced layers.
        hyperparameters: for the table.
        command: as typed.
        versions: of the libraries.
        license_id: the base model's, when it is known.
    """

    title: str
    auto_class: str
    base_model: str | None
    task: str
    dataset: str
    metrics: Mapping[str, float]
    teacher_metrics: Mapping[str, float] | None
    trained: str
    stages: Sequence[str]
    primal_layers: Sequence[int]
    hyperparameters: Mapping[str, object]
    command: str
    versions: Mapping[str, str]
    license_id: str | None = None


def finetuned_card(tuning: FineTuning) -> str:
    """The README.md of a fine-tuned model, with local files named without their folders."""
    metrics, teacher = told(tuning.metrics), told(tuning.teacher_metrics or {})
    dataset = public_name(tuning.dataset)
    base = tuning.base_model if tuning.base_model and is_hub_id(tuning.base_model) else None
    return render(
        "finetuned.md.jinja",
        tuning.title,
        results(
            tuning.auto_class,
            tuning.dataset,
            dataset,
            [(name, name.replace("_", " "), value) for name, value in metrics.items()],
        ),
        {
            "base_model": base,
            "license": tuning.license_id,
            "pipeline_tag": pipeline_tag(tuning.auto_class),
            "tags": ["primal-attention", "linear-attention", "custom_code"],
        },
        tuning=tuning,
        metrics=metrics,
        teacher=teacher,
        dataset=hub_link(tuning.dataset, "datasets/"),
        base=hub_link(tuning.base_model),
        trained=TRAINED.get(tuning.trained, tuning.trained),
        command=public_command(tuning.command),
        hyperparameters={
            name: public_name(value) if isinstance(value, str) else value
            for name, value in tuning.hyperparameters.items()
        },
    )


def told(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of the model without "eval_", and without those of the run or that are no number."""
    named = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    return {name: value for name, value in named.items() if name not in UNTOLD and math.isfinite(value)}
