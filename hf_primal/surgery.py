"""Teacher and fitted layers to a converted model whose every other tensor is the teacher's, bit for bit."""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from hf_primal.modeling import modeling_primal
from hf_primal.modeling.configuration_primal import primal_config_class
from hf_primal.modeling.primal_attention import PrimalAttention
from hf_primal.modeling.primal_settings import PrimalSettings

NOT_COPIED = ("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path")


def full_auto_map(teacher: PreTrainedModel, replaced: Iterable[int]) -> dict[str, str]:
    """`auto_map` with every head of the teacher's family under which the layers at these indices are the same ones.

    A head with a backbone of another kind or name, or with one half of an encoder-decoder alone, may not be.
    """
    base_class, own = type(teacher), replaced_names(teacher, replaced)
    config_class: Any = base_class.config_class
    entries = {"AutoConfig": f"configuration_primal.Primal{config_class.__name__}"}
    for auto, known in modeling_primal.auto_heads(config_class.model_type).items():
        head = getattr(transformers, known, None)
        if head is None or (head.config_class, head.base_model_prefix) != (config_class, base_class.base_model_prefix):
            continue
        if teacher.config.is_encoder_decoder:
            with no_init_weights(), torch.device("meta"):
                if replaced_names(head(copy.deepcopy(teacher.config)), replaced) != own:
                    continue
        entries[auto] = f"modeling_primal.Primal{known}"
    return entries


def replaced_names(model: PreTrainedModel, replaced: Iterable[int]) -> list[str]:
    """Names of the self-attention modules at these indices, from the backbone on; an empty one for no such index."""
    names = [name for name, _ in modeling_primal.self_attention_modules(model)]
    own = [names[index] if index < len(names) else "" for index in replaced]
    return [name.removeprefix(f"{model.base_model_prefix}.") for name in own]


def primal_class(teacher: PreTrainedModel) -> type[PreTrainedModel]:
    """`Primal<Base>` for the teacher's class.

    Raises:
        ValueError: the teacher's class is not one of the installed Transformers, or is converted already.
    """
    name = type(teacher).__name__
    if getattr(teacher.config, "primal_layers", None) is not None:
        raise ValueError(f"{name} is a converted model already; convert its base model instead")
    if getattr(transformers, name, None) is not type(teacher):
        raise ValueError(
            f"{name} is not a class of transformers {transformers.__version__}; only those can be converted"
        )
    return getattr(modeling_primal, f"Primal{name}")


def build_converted(
    teacher: PreTrainedModel, primals: Mapping[int, PrimalAttention], settings: PrimalSettings
) -> PreTrainedModel:
    """A new model with the fitted layers; the teacher is left alone and shares no tensor with it.

    Args:
        teacher: a Transformers model.
        primals: fitted layers by self-attention index; cast to the dtype of the teacher's weights.
        settings: what the layers were built from.

    Returns:
        `Primal<Base>` in eval mode, on the teacher's device, in its dtype.

    Raises:
        ValueError: as `primal_class`; a fitted number outside the range of the teacher's dtype.
    """
    from hf_primal import __version__

    made = primal_class(teacher)
    fields: dict[str, Any] = {k: v for k, v in teacher.config.to_dict().items() if k not in NOT_COPIED}
    own = dataclasses.asdict(settings)
    config_class: Any = primal_config_class(type(teacher.config))
    config = config_class(
        **fields,
        architectures=[made.__name__],
        primal_layers=sorted(primals),
        ksvd_weight=float(own.pop("ksvd_weight")),
        primal=own,
        primal_versions={
            "hf_primal": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        auto_map=full_auto_map(teacher, sorted(primals)),
    )
    config._attn_implementation = teacher.config._attn_implementation
    with no_init_weights():
        model = made(config)
    modules = modeling_primal.self_attention_modules(model)
    weights = {name: tensor.detach().clone() for name, tensor in teacher.state_dict().items()}
    for index, primal in primals.items():
        for name, tensor in primal.state_dict().items():
            cast = tensor.detach().to(teacher.device, teacher.dtype, copy=True)
            if not cast.isfinite().all():
                raise ValueError(
                    f"{name} of layer {index} does not fit {teacher.dtype}; use --dtype bfloat16 or float32"
                )
            weights[f"{modules[index][0]}.primal.{name}"] = cast
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model = torch.nn.Module.to(model, teacher.device)  # buffers that no checkpoint holds
    if teacher.can_generate():
        model.generation_config = copy.deepcopy(teacher.generation_config)
    return model.eval()
