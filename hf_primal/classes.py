"""`Primal<Base>` and `Primal<Base>Config` by name, for models from scratch, and known to the Auto classes."""

import transformers
from transformers import AutoConfig, PreTrainedConfig

from hf_primal.modeling import configuration_primal, modeling_primal


def find_class(name: str) -> type:
    """The class of this name, for any base that the installed Transformers has.

    A configuration is registered with its models, so that `AutoModelForX.from_config` takes it.

    Args:
        name: PrimalBertConfig, PrimalBertForMaskedLM, ...

    Raises:
        AttributeError: Transformers has no such base.
    """
    if not name.endswith("Config"):
        return getattr(modeling_primal, name)
    made: type[PreTrainedConfig] = getattr(configuration_primal, name)
    AutoConfig.register(made.model_type, made, exist_ok=True)
    for auto, known in modeling_primal.auto_heads(made.model_type.removeprefix("primal_")).items():
        if hasattr(transformers, known):
            getattr(transformers, auto).register(made, getattr(modeling_primal, f"Primal{known}"), exist_ok=True)
    return made
