"""Configurations made on demand: `Primal<Base>Config` is `transformers.<Base>Config` plus the primal fields.

The model type is our own (`primal_bert`), so that loading without `trust_remote_code` fails loudly instead of
giving a stock model with random weights in the replaced layers.
"""

from typing import Any

import transformers

from .primal_versions import check_transformers

check_transformers(transformers.__version__)


def primal_config_class(base: type[transformers.PreTrainedConfig]) -> type[transformers.PreTrainedConfig]:
    """`Primal<Base>Config` for a Transformers configuration class; the same class for every call."""
    name = f"Primal{base.__name__}"
    if name in globals():
        return globals()[name]
    fields: dict[str, tuple[Any, Any]] = {
        "primal_layers": (list[int] | None, None),  # replaced self-attention modules, in depth order
        "primal": (dict[str, Any] | None, None),  # the PrimalSettings of those layers
        "ksvd_weight": (float, 0.001),  # eta of the KSVD loss, >= 0; 0 switches it off
        "primal_folded": (dict[str, str] | None, None),  # projections that hold maps of those layers, by role
        "primal_versions": (dict[str, str] | None, None),  # what converted the model
    }
    body = {
        "__module__": __name__,
        "__doc__": f"{base.__name__} with the fields of Primal-Attention.",
        "__annotations__": {field: annotation for field, (annotation, _) in fields.items()},
        "model_type": f"primal_{base.model_type}",
        "_auto_class": "AutoConfig",
        **{field: default for field, (_, default) in fields.items()},
    }
    globals()[name] = type(name, (base,), body)
    return globals()[name]


def __getattr__(name: str) -> type[transformers.PreTrainedConfig]:
    """Build `Primal<Base>Config`, found by the Auto classes through `auto_map`."""
    base = getattr(transformers, name.removeprefix("Primal"), None) if name.startswith("Primal") else None
    if not (isinstance(base, type) and issubclass(base, transformers.PreTrainedConfig)):
        raise AttributeError(f"{name}: transformers {transformers.__version__} has no such configuration")
    return primal_config_class(base)
