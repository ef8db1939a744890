"""Model cards: the template for converted models, and how it is filled in."""

from importlib.resources import files

from huggingface_hub import ModelCard, ModelCardData

from hf_primal.modeling.primal_versions import OLDEST_TRANSFORMERS
from hf_primal.report import ConversionReport


def converted_card(
    report: ConversionReport,
    title: str,
    auto_class: str,
    plots: list[str],
    base_model: str | None = None,
    license_id: str | None = None,
) -> str:
    """The README.md of a converted model.

    Args:
        report: of the conversion.
        title: what the model is called.
        auto_class: the Auto class that loads it.
        plots: names of the PNG files beside the card.
        base_model: hub id of the teacher; None leaves the field out of the front matter.
        license_id: the base model's, when it is known.
    """
    data = ModelCardData(
        base_model=base_model,
        license=license_id,
        library_name="transformers",
        tags=["primal-attention", "linear-attention", "custom_code"],
    )
    template = files("hf_primal.model_cards").joinpath("converted.md.jinja").read_text(encoding="utf-8")
    card = ModelCard.from_template(
        data,
        template_str=template,
        report=report,
        title=title,
        auto_class=auto_class,
        plots=plots,
        oldest_transformers=OLDEST_TRANSFORMERS,
        base_link=f"https://huggingface.co/{base_model}" if base_model else "",
    )
    return str(card)
