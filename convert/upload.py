"""What of a folder is uploaded: whether it is complete, its files, and what changes in card and reports on the way."""

import fnmatch
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_primal.convert.hub import public_command, without_folders

LEFT_BEHIND = (  # of training, of editors and of systems; any part of a path that is like one of them
    "checkpoint-*", "runs", "global_step*", "optimizer*.pt", "optimizer*.bin", "scheduler*.pt", "scheduler*.bin",
    "scaler.pt", "rng_state*.pth", "random_states_*.pkl", "training_args.bin", "trainer_state.json",
    "events.out.tfevents*", "__pycache__", "*.tmp", "*.lock", ".*",
)  # fmt: skip
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin*")
REPORTS = "*_report.json"


def check_folder(folder: Path) -> None:
    """Check that a folder holds a model that others can load: config, code, weights and card.

    Raises:
        ValueError: what is missing, and what to do.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one that primal-convert wrote")
    code = code_files(folder)
    shards = weight_files(folder)
    for needed, why in (
        *((name, "code that its config.json names; convert again") for name in code),
        *((name, "its weights; convert again") for name in shards),
        ("README.md", "the model card; convert again, or write one"),
    ):
        if not (folder / needed).is_file():
            raise ValueError(f"{folder} has no {needed} ({why})")


def code_files(folder: Path) -> list[str]:
    """The `.py` files that a converted model's config names, and those that they import from beside them.

    Raises:
        ValueError: there is no config, or it is not a converted model's.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        classes = config["auto_map"].values() if config["primal_layers"] is not None else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        classes = []
    if not classes:
        raise ValueError(
            f"{folder} is not a converted model: no config.json with primal_layers and auto_map; "
            "convert one with primal-convert MODEL"
        )
    found: list[str] = []
    waiting = [f"{name.split('--')[-1].split('.')[0]}.py" for value in classes for name in texts_in(value)]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            text = (folder / name).read_text(encoding="utf-8") if (folder / name).is_file() else ""
            waiting += [f"{module}.py" for module in re.findall(r"^\s*from \.(\w+) import", text, re.M)]
    return sorted(found)


def texts_in(value: Any) -> list[str]:
    """The strings of a value that is one, or a list with some."""
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def weight_files(folder: Path) -> list[str]:
    """The safetensors files that a folder must have: the one, or the shards that its index names."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return ["model.safetensors"]
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def contents_to_push(folder: Path, name: str) -> dict[str, Path | bytes]:
    """What to upload: files by their path in the repository, and the text of those that change on the way."""
    contents: dict[str, Path | bytes] = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        kept = not any(fnmatch.fnmatch(part, like) for part in relative.parts for like in LEFT_BEHIND)
        if kept and path.is_file():
            contents[relative.as_posix()] = path
    contents["README.md"] = hub_card((folder / "README.md").read_text(encoding="utf-8"), name).encode()
    for path in folder.glob(REPORTS):
        contents[path.name] = hub_report(path.read_text(encoding="utf-8")).encode()
    return contents


def hub_card(card: str, name: str) -> str:
    """A card whose Python code names `name` where it named the local folder, which is the card's title."""
    title = re.search(r"^# (.+?)\s*$", card, re.M)
    if not title:
        return card
    code = re.compile(r"^```python\n.*?^```", re.M | re.S)
    return code.sub(lambda block: block[0].replace(f'"{title[1]}"', f'"{name}"'), card)


def hub_report(text: str) -> str:
    """A report, which is JSON, whose local paths are cut to their last names."""
    return json.dumps(shortened(json.loads(text)), indent=2) + "\n"


def shortened(value: Any, key: str = "") -> Any:
    """A JSON value whose strings, and the words of whose commands, have no folders."""
    if isinstance(value, dict):
        return {name: shortened(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value]
    if isinstance(value, str):
        return public_command(value) if key == "command" else without_folders(value)
    return value


def refuse_secret(contents: Mapping[str, Path | bytes], token: str) -> None:
    """Refuse to upload the token; weights are not searched.

    Raises:
        ValueError: the file that holds it.
    """
    for name, content in contents.items():
        if not name.endswith(".safetensors"):
            data = content if isinstance(content, bytes) else content.read_bytes()
            if token.encode() in data:
                raise ValueError(
                    f"{name} holds your Hugging Face token, so nothing was pushed; take it out of the file"
                )


def stale_weights(there: Iterable[str], contents: Mapping[str, Path | bytes]) -> list[str]:
    """Weights at the top of the repository that would be loaded instead of, or beside, those to be pushed."""
    return [
        path
        for path in there
        if path not in contents and "/" not in path and any(fnmatch.fnmatch(path, like) for like in WEIGHTS)
    ]
