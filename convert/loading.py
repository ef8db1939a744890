"""A model's name to the teacher and its tokenizer, with the head that its checkpoint was made for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from hf_primal.convert.config import TASKS
from hf_primal.convert.hub import HUB_ID, first_line, go_offline_without_hub
from hf_primal.modeling.modeling_primal import auto_heads


@dataclass
class Teacher:
    """A loaded model with what was noticed on the way."""

    model: PreTrainedModel
    processor: Any
    notes: list[str]


def load_config(model: str, revision: str | None, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration of a folder or hub id.

    Raises:
        ValueError: neither of the two, in one line.
    """
    if not Path(model).is_dir():
        if Path(model).is_file() or not HUB_ID.fullmatch(model):
            raise ValueError(f"{model!r} is neither a folder nor a hub id such as bert-base-uncased or user/name")
        go_offline_without_hub()
    elif not (Path(model) / "config.json").is_file():
        raise ValueError(f"folder {model!r} has no config.json; give a folder saved by save_pretrained")
    try:
        return AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if Path(model).is_dir():
            raise ValueError(f"cannot load {model!r}: {first_line(error)}") from error
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            reason = "the hub is not reachable and the local cache does not have it"
        else:
            reason = f"the hub gave: {first_line(error)}"
        raise ValueError(f"cannot load {model!r}: there is no such folder here, and {reason}") from error


def model_class(config: PreTrainedConfig, task: str) -> tuple[type[Any], list[str]]:
    """The Transformers class to load, and a note where the checkpoint's own is not known.

    Raises:
        ValueError: a task that the family has no head for.
    """
    heads = auto_heads(config.model_type)
    if task != "auto":
        if TASKS[task] not in heads:
            known = ", ".join(name for name, auto in TASKS.items() if auto in heads)
            raise ValueError(f"--task {task}: model type {config.model_type} has no such head; it has {known}")
        return getattr(transformers, heads[TASKS[task]]), []
    named = config.architectures[0] if config.architectures else None
    known_class = getattr(transformers, named or "", None)
    if isinstance(known_class, type) and issubclass(known_class, PreTrainedModel):
        return known_class, []
    note = (
        f"architecture {named!r} is not in transformers; converted the backbone alone"
        if named
        else "the config names no architecture; converted the backbone"
    )
    return AutoModel, [note]


@dataclass
class Blueprint:
    """What is known of a model from its config alone: the class to load, its modules without weights, and notes."""

    loader: type[Any]
    model: PreTrainedModel
    notes: list[str]


def draw_blueprint(
    model: str, task: str = "auto", revision: str | None = None, trust_remote_code: bool = False
) -> Blueprint:
    """Build a model on the meta device, which takes no memory.

    Args:
        model: folder or hub id.
        task: "auto" keeps the head that config.architectures names; or a key of `TASKS`.
        revision: hub revision.
        trust_remote_code: run code that comes with the model.

    Raises:
        ValueError: no such model, or a task that the family has no head for.
    """
    config = load_config(model, revision, trust_remote_code)
    loader, notes = model_class(config, task)
    with no_init_weights(), torch.device("meta"):
        if loader is AutoModel:
            built = loader.from_config(config, trust_remote_code=trust_remote_code)
        else:
            built = loader(config)
    return Blueprint(loader, built, notes)


def load_teacher(
    model: str,
    blueprint: Blueprint,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    dtype: str = "auto",
) -> Teacher:
    """Load a model in eval mode with its tokenizer (None if it has none).

    Args:
        model: folder or hub id.
        blueprint: of the model.
        revision: hub revision.
        trust_remote_code: run code that comes with the model.
        device: "auto" (an accelerator if there is one), or a torch device.
        dtype: "auto" (the checkpoint's), float32, bfloat16 or float16.

    Raises:
        ValueError: what could not be loaded, in one line; weights of the head that the checkpoint does not have.
    """
    loader, notes = blueprint.loader, list(blueprint.notes)
    try:
        teacher, info = loader.from_pretrained(
            model,
            revision=revision,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        teacher = teacher.to(find_device(device))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"cannot load the weights of {model!r}: {first_line(error)}") from error
    missing = sorted(info["missing_keys"])
    needed = [key for key in missing if "pooler" not in key]
    if needed:
        raise ValueError(
            f"{model!r} has no weights for {needed[0]} of {type(teacher).__name__}; use --task auto: the result loads "
            "under every Auto class of the family, which adds the head"
        )
    if missing:
        notes.append(f"the checkpoint has no pooler; {', '.join(missing)} are random and should not be used")
    try:
        processor = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError):
        processor = None
    return Teacher(teacher.eval(), processor, notes)


def find_device(device: str) -> torch.device:
    """The device that --device names.

    Raises:
        ValueError: torch does not know it, or this machine does not have it.
    """
    if device == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        torch.empty(1, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} is not usable here ({first_line(error)}); use auto or cpu") from error
