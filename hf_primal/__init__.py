"""hf-primal: pretrained Transformers models with Primal-Attention in their deepest layers."""

from importlib.metadata import version
from typing import Any

from hf_primal.modeling.primal_attention import PrimalAttention
from hf_primal.modeling.primal_settings import PrimalSettings
from hf_primal.modeling.primal_versions import check_transformers

check_transformers(version("transformers"))

__version__ = "0.1.0"
__all__ = ["PrimalAttention", "PrimalSettings", "__version__", "convert_model"]


def __getattr__(name: str) -> Any:
    """On first use, so that importing the layer stays light: `convert_model`, and `Primal<Base>` classes."""
    if name == "convert_model":
        from hf_primal.convert.pipeline import convert_model

        return convert_model
    if not name.startswith("Primal"):
        raise AttributeError(f"module 'hf_primal' has no attribute {name!r}")
    from hf_primal.classes import find_class

    return find_class(name)
