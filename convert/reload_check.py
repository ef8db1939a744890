"""Run as a script in a fresh process: load a saved folder as its users will, and compare with what was saved.

Needs torch and transformers only; hf_primal is made impossible to import.
"""

import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any


def digest(tensor: Any) -> str:
    """SHA-256 of a tensor's shape, dtype and bytes."""
    import torch

    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tuple(tensor.shape)}{tensor.dtype}".encode() + raw).hexdigest()


def outputs_of(model: Any, inputs: dict[str, Any]) -> list[Any]:
    """All floating-point outputs of one forward in eval mode, on the CPU."""
    import torch

    with torch.no_grad():
        output = model.eval()(**inputs)
    tensors = [value for value in output.values() if isinstance(value, torch.Tensor)]
    return [tensor.cpu() for tensor in tensors if tensor.is_floating_point()]


def main(folder: Path, expected_file: Path) -> str:
    """What differs, in one line; empty when nothing does."""
    sys.modules["hf_primal"] = None  # type: ignore[assignment]
    import torch
    import transformers

    expected = torch.load(expected_file, weights_only=True)
    torch.set_num_threads(expected["threads"])
    config = json.loads((folder / "config.json").read_text())
    code = f"modeling_primal.{config['architectures'][0]}"
    auto = next((name for name, value in config["auto_map"].items() if value == code), None)
    if auto:
        model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
    else:
        dynamic = importlib.import_module("transformers.dynamic_module_utils")
        model = dynamic.get_class_from_dynamic_module(code, folder).from_pretrained(folder)
    model = model.to(expected["device"])
    found = {name: digest(tensor) for name, tensor in model.state_dict().items()}
    for name in sorted(found.keys() | expected["digests"].keys()):
        if found.get(name) != expected["digests"].get(name):
            state = "differs" if name in found and name in expected["digests"] else "is only on one side"
            return f"tensor {name} {state} after reload"
    outputs = outputs_of(model, {name: value.to(model.device) for name, value in expected["inputs"].items()})
    for ours, saved in zip(outputs, expected["outputs"], strict=True):
        tolerance = 1e-5 if saved.dtype == torch.float32 else 2e-2
        error = float((ours.float() - saved.float()).abs().max() / saved.float().abs().max().clamp(min=1e-9))
        if not error <= tolerance:
            return f"outputs differ by {error:.1e} after reload"
    return ""


if __name__ == "__main__":
    difference = main(Path(sys.argv[1]), Path(sys.argv[2]))
    if difference:
        sys.exit(difference)
