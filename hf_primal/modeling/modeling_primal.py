"""Models made on demand: `Primal<Base>` is `transformers.<Base>` with Primal-Attention in the chosen layers.

A replaced layer keeps its attention module with projections, norms and masks; only the attention function of that
one module changes, by giving it its own copy of the config, and a child module `primal` holds the parameters.
"""

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto import modeling_auto

from .cache_primal import adopt, remember_cache
from .configuration_primal import primal_config_class
from .primal_attention import PrimalAttention
from .primal_band import banded  # noqa: F401  # the loader of Transformers 5.4 copies what is named here alone
from .primal_fold import fold, make_room
from .primal_interface import primal_attention_forward
from .primal_settings import PrimalSettings
from .primal_triton import fused  # noqa: F401
from .training_primal import KsvdCallback, add_ksvd_loss, smoothed_loss

AttentionInterface.register("primal", primal_attention_forward)
logger = transformers.logging.get_logger(__name__)


def self_attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of every self-attention of a Transformers model, in depth order.

    Source: the classes that the model itself records attentions from (`_can_record_outputs`).
    """
    found: dict[str, nn.Module] = {}
    for prefix, owner in model.named_modules():
        recorded = (getattr(owner, "_can_record_outputs", None) or {}) if isinstance(owner, PreTrainedModel) else {}
        entries = recorded.get("attentions")
        for entry in entries if isinstance(entries, list) else [entries]:
            kind, layer = getattr(entry, "target_class", entry), getattr(entry, "layer_name", None)
            for name, module in owner.named_modules(prefix=prefix):
                here = not layer or layer.strip(".") in name.split(".")
                if here and issubclass(type(module), kind if isinstance(kind, type) else ()):
                    found |= attention_inside(name, module)
    return [(name, module) for name, module in model.named_modules() if name in found]


def attention_inside(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The attention module of a recorded one: itself, or its child that has the config (T5 records the whole block)."""
    inner = {f"{name}.{child_name}": child for child_name, child in module.named_children() if hasattr(child, "config")}
    return inner if inner and not hasattr(module, "config") else {name: module}


def head_shape(module: nn.Module, config: Any) -> tuple[int, int]:
    """Query heads H and head dim d of an attention module, which knows them by one of several names."""
    counts = [getattr(module, field, None) for field in ("num_attention_heads", "num_heads", "n_heads")]
    heads = next((count for count in counts if isinstance(count, int)), config.num_attention_heads)
    dims = [getattr(module, field, None) for field in ("head_dim", "attention_head_size", "head_size")]
    dims += [getattr(module, "key_value_proj_dim", None), getattr(config, "head_dim", None)]
    return heads, next((dim for dim in dims if isinstance(dim, int)), config.hidden_size // heads)


def install(model: PreTrainedModel) -> None:
    """Put a PrimalAttention into the layers that `model.config.primal_layers` names."""
    modules = self_attention_modules(model)
    settings = PrimalSettings(**{**(model.config.primal or {}), "ksvd_weight": model.config.ksvd_weight})
    for index in model.config.primal_layers or []:
        if not 0 <= index < len(modules):
            raise ValueError(
                f"primal_layers has {index}, but this model's self-attention layers are 0..{len(modules) - 1}"
            )
        module: Any = modules[index][1]
        module.config = copy.copy(module.config)
        module.config._attn_implementation_internal = "primal"
        module.register_forward_pre_hook(remember_cache, with_kwargs=True)
        folded = model.config.primal_folded or {}
        module.primal = PrimalAttention(*head_shape(module, module.config), settings, folded=tuple(folded))
        module.primal.alone = False
        make_room(module, folded)
    freeze_unused(model)


def freeze_unused(model: nn.Module) -> None:
    """Freeze the parameters that can get no gradient, so that DistributedDataParallel does not wait for them.

    The value projection where the output is read off the scores alone, and Lambda where there is no KSVD loss.
    """
    for module in model.modules():
        primal = getattr(module, "primal", None)
        if not isinstance(primal, PrimalAttention):
            continue
        if primal.settings.ksvd_weight == 0:
            primal.Lambda.requires_grad_(False)
        if primal.settings.readout == "scores" and primal.settings.weights == "fixed":
            for name, child in module.named_children():
                if name.startswith("v") and isinstance(child, nn.Linear):  # value, v_proj, v_lin, v
                    child.requires_grad_(False)


def _init_weights(self: PreTrainedModel, module: nn.Module) -> None:
    """Initialise what a checkpoint does not have: ours for PrimalAttention, the base's for everything else."""
    if isinstance(module, PrimalAttention):
        for name, value in module.initial_values().items():
            init.copy_(module.get_parameter(name) if name in module._parameters else module.get_buffer(name), value)
    else:
        type(self)._init_weights(self, module)


def tell_attentions(model: PreTrainedModel) -> None:
    """Say once which layers the recorded attentions are of: the replaced ones have no attention matrix."""
    replaced = model.config.primal_layers or []
    kept = [index for index in range(len(self_attention_modules(model))) if index not in replaced]
    logger.warning_once(
        f"output_attentions: replaced layers {replaced} have no attention matrix; the attentions are those of layers "
        f"{kept}, in this order"
    )


def with_ksvd_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Add the KSVD loss to the loss of a training forward; see `add_ksvd_loss`."""

    @functools.wraps(forward)  # Trainer reads the signature to decide which columns to keep
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers = [module for module in self.modules() if isinstance(module, PrimalAttention)]
        if layers and kwargs.get("output_attentions"):
            tell_attentions(self)
        squares: list[Tensor] = []
        for layer in layers:
            layer.squares, layer.regularised = squares, self.config.ksvd_weight > 0
        if self.training:
            self.last_losses = {}
        output = forward(self, *args, **kwargs)
        for layer in layers:
            layer.squares = None
        done = not self.training or self.last_losses  # by the forward of a superclass
        return output if done else add_ksvd_loss(self, output, squares)

    return wrapped


def without_reentrant(setter: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse reentrant gradient checkpointing, under which the KSVD loss has no gradient."""

    @functools.wraps(setter)  # Transformers reads the signature
    def wrapped(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        checkpoint = kwargs.get("gradient_checkpointing_func")
        options = getattr(checkpoint, "keywords", {"use_reentrant": checkpoint is not None})
        if options.get("use_reentrant", True) and self.config.ksvd_weight > 0:
            raise ValueError(
                "reentrant gradient checkpointing gives the KSVD loss no gradient; use "
                f'{{"use_reentrant": False}}, or config.ksvd_weight 0 (it is {self.config.ksvd_weight})'
            )
        return setter(self, *args, **kwargs)

    return wrapped


class PrimalMixin(PreTrainedModel):
    """Installs the replaced layers, owns their initialisation and adds the KSVD loss.

    `last_losses` holds the parts of the latest training forward's loss, "loss_task" (when there were labels) and
    "loss_ksvd" (scaled by config.ksvd_weight). Without labels "loss_ksvd" is in no loss yet and has its gradient, to be
    added to one. It is here and not in the model's output because mixed precision and DistributedDataParallel build
    that again, from its known keys.
    """

    accepts_loss_kwargs = False  # Trainer then averages micro-batches itself: accumulation does not scale the loss

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if PrimalMixin in cls.__bases__ or "forward" in vars(cls):
            cls.forward = with_ksvd_loss(cls.forward)
        if PrimalMixin in cls.__bases__:
            refusing = without_reentrant(cls._set_gradient_checkpointing)
            cls._set_gradient_checkpointing = refusing  # type: ignore[method-assign]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.last_losses: dict[str, Tensor] = {}
        self.expects_labels = True  # and warns of a training forward without
        install(self)
        for module in self.modules():
            if isinstance(module, PreTrainedModel):
                vars(module)["_init_weights"] = MethodType(_init_weights, module)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As Transformers' own; loading makes new parameters, so what `install` froze is frozen again."""
        loaded = super().from_pretrained(*args, **kwargs)
        freeze_unused(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave `last_losses` behind: it may hold a graph."""
        return {**self.__dict__, "last_losses": {}}

    def fold(self) -> Any:
        """Put the layers' maps into the projections beside them, in place: the same function in less time.

        W_v goes into the value projection; without a band the landmarks go into those of q and k, which then give p
        outputs a head. For models whose q, k and v come straight from linear layers (no rotary positions, no norms).

        Returns:
            The model itself.

        Raises:
            ValueError: it is folded already or cannot be; it is left as it was.
        """
        fold(self)
        return self

    def ksvd_callback(self) -> KsvdCallback:
        """For `Trainer(callbacks=[model.ksvd_callback()])`: `loss_task` and `loss_ksvd` in its log."""
        return KsvdCallback(self)

    def smoothed_loss(self, smoothing: float) -> Callable[..., Tensor]:
        """For `Trainer(compute_loss_func=model.smoothed_loss(0.1))`: label smoothing together with the KSVD loss.

        Args:
            smoothing: part of the target that is spread over all classes, 0..1.

        Raises:
            ValueError: smoothing outside 0..1.
        """
        return smoothed_loss(self, smoothing)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Give the replaced layers their place in the cache that `generate` starts from, whatever it is called."""
        result = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        modules: list[Any] = [m for m in self.modules() if hasattr(m, "primal") and getattr(m, "is_causal", False)]
        for cache in (value for value in model_kwargs.values() if isinstance(value, Cache)):
            for module in modules:
                adopt(cache, module.layer_idx)
            if getattr(generation_config, "is_assistant", False) and hasattr(cache, "activate_past_recording"):
                cache.activate_past_recording()
        return result


def auto_heads(base_type: str) -> dict[str, str]:
    """Every Auto class that knows the base model type, with the Transformers class it gives; `AutoModel` first."""
    heads = {}
    for name, auto in sorted(vars(modeling_auto).items(), key=lambda item: len(item[0])):
        mapping = getattr(getattr(auto, "_model_mapping", None), "_model_mapping", {})
        if name.startswith("AutoModel") and base_type in mapping:
            known = mapping[base_type]
            heads[name] = known[0] if isinstance(known, tuple) else known
    return heads


def __getattr__(name: str) -> type:
    """Build `Primal<Base>`, found by the Auto classes through `auto_map`."""
    base_name = name.removeprefix("Primal")
    base = getattr(transformers, base_name, None) if name.startswith("Primal") and base_name else None
    if not (isinstance(base, type) and issubclass(base, PreTrainedModel)):
        raise AttributeError(f"{name}: transformers {transformers.__version__} has no model class {base_name!r}")
    config_class: Any = base.config_class
    autos = [auto for auto, known in auto_heads(config_class.model_type).items() if known == base_name]
    made = type(
        name,
        (PrimalMixin, base),
        {
            "__module__": __name__,
            "__doc__": f"{base_name} with Primal-Attention in the layers that config.primal_layers names.",
            "config_class": primal_config_class(config_class),
            "_auto_class": autos[0] if autos else "AutoModel",
        },
    )
    conversions = get_checkpoint_conversion_mapping(base_name)
    if conversions is not None:  # renamed checkpoint keys are known by class name
        register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    globals()[name] = made
    return made
