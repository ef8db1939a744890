"""The card of a converted model."""

import dataclasses

from hf_primal.convert.hub import public_command, public_name
from hf_primal.model_cards.front_matter import pipeline_tag, render, results
from hf_primal.report import ConversionReport


def converted_card(
    report: ConversionReport,
    title: str,
    auto_class: str,
    plots: list[str],
    base_model: str | None = None,
    license_id: str | None = None,
) -> str:
    """The README.md of a converted model, with local files named without their folders.

    Args:
        report: of the conversion.
        title: what the model is called.
        auto_class: the Auto class that loads it.
        plots: names of the PNG files beside the card.
        base_model: hub id of the teacher; None leaves the field out of the front matter.
        license_id: the base model's, when it is known.
    """
    source = str(report.calibration.get("source", "the calibration data"))
    shown = dataclasses.replace(
        report,
        model=public_name(report.model),
        command=report.command and public_command(report.command),
        calibration={
            name: public_name(value) if isinstance(value, str) else value for name, value in report.calibration.items()
        },
    )
    kept = report.fidelity
    dataset = public_name(source) if kept.calibration_data else f"held-out part of {public_name(source)}"
    metrics = (
        ("cosine_similarity", "mean cosine of the last hidden states with the base model's", kept.hidden_cosine),
        ("kl_divergence", "KL divergence of the logits from the base model's, nats", kept.logits_kl),
    )
    text_backbone = auto_class == "AutoModel" and report.calibration.get("tokens") is not None
    return render(
        "converted.md.jinja",
        title,
        results(auto_class, source, dataset, metrics),
        {
            "base_model": base_model,
            "license": license_id,
            "pipeline_tag": "feature-extraction" if text_backbone else pipeline_tag(auto_class),
            "tags": ["primal-attention", "linear-attention", "custom_code"],
        },
        report=shown,
        auto_class=auto_class,
        plots=plots,
        base_link=f"https://huggingface.co/{base_model}" if base_model else "",
    )
