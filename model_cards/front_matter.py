"""What the front matter of every card has in common: tags, task, and results as a model-index."""

import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_primal.convert.hub import HUB_ID, is_local, public_name
from hf_primal.modeling.primal_versions import OLDEST_TRANSFORMERS

HUB_TASKS = {  # by Auto class, the hub's name for what it is for
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSeq2SeqLM": "text2text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForAudioClassification": "audio-classification",
    "AutoModelForCTC": "automatic-speech-recognition",
}
UNTAGGED = ("AutoModelForSeq2SeqLM",)  # translation, summary or else: only who trained it knows
BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}


def hub_task(auto_class: str) -> str:
    """The hub's name for what a head is for; "feature-extraction" for a backbone and for heads that have no name."""
    return HUB_TASKS.get(auto_class, "feature-extraction")


def pipeline_tag(auto_class: str) -> str | None:
    """What the hub's page offers a model for, where its head settles that."""
    return None if auto_class in UNTAGGED else HUB_TASKS.get(auto_class)


def dataset_type(source: str) -> str:
    """A hub dataset's id, or the kind of a local one as datasets calls it."""
    known = BUILDERS.get(PurePath(source).suffix.lower())
    if known or is_local(source) or not HUB_ID.fullmatch(source):
        return known or "text"
    return source


def results(
    auto_class: str, source: str, dataset: str, metrics: Sequence[tuple[str, str, float | None]]
) -> list[EvalResult]:
    """Entries of a model-index.

    Args:
        auto_class: of the model.
        source: of the data: a file, folder or hub id.
        dataset: what to call the data.
        metrics: type, name in words, and value of each; those without a finite value are left out.
    """
    return [
        EvalResult(
            task_type=hub_task(auto_class),
            dataset_type=dataset_type(source),
            dataset_name=dataset,
            metric_type=kind,
            metric_name=name,
            metric_value=round(value, 6),
        )
        for kind, name, value in metrics
        if value is not None and math.isfinite(value)
    ]


def render(template: str, title: str, found: list[EvalResult], matter: dict[str, Any], **values: Any) -> str:
    """A card.

    Args:
        template: file name in this folder.
        title: what the model is called; not `model_name`, which huggingface_hub empties in a template beside results.
        found: entries of the model-index; none for no model-index.
        matter: further fields of the front matter; None is left out.
        values: what the template uses.
    """
    data = ModelCardData(
        **matter,
        library_name="transformers",
        model_name=title if found else None,
        eval_results=found or None,
    )
    text = files("hf_primal.model_cards").joinpath(template).read_text(encoding="utf-8")
    values |= {"title": title, "oldest_transformers": OLDEST_TRANSFORMERS}
    return str(ModelCard.from_template(data, template_str=text, **values))


def hub_link(name: str | None, kind: str = "") -> str:
    """A hub id of the form USER/NAME as a link, any other name as code, None as "".

    Args:
        name: of a model or dataset.
        kind: "datasets/" for a dataset.
    """
    if not name:
        return ""
    return f"[{name}](https://huggingface.co/{kind}{name})" if is_hub_id(name) else f"`{public_name(name)}`"


def is_hub_id(name: str) -> bool:
    """Whether a name is of the form USER/NAME and nothing here is called so."""
    return "/" in name and bool(HUB_ID.fullmatch(name)) and not is_local(name)
