"""Proof that a saved folder reloads: a fresh process without this package, offline, equal tensors and outputs."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_primal.convert import reload_check


def verify_reload(folder: Path, model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> None:
    """Load `folder` in a subprocess under its Auto class and compare it with the model it was saved from.

    Args:
        folder: saved model.
        model: what was saved, in memory.
        inputs: keyword arguments for one forward.

    Raises:
        RuntimeError: a tensor is not equal bit for bit, an output is not equal to rounding, or it does not load.
    """
    with tempfile.TemporaryDirectory() as scratch:
        expected = Path(scratch) / "expected.pt"
        torch.save(
            {
                "digests": {name: reload_check.digest(tensor) for name, tensor in model.state_dict().items()},
                "inputs": {name: value.cpu() for name, value in inputs.items()},
                "outputs": reload_check.outputs_of(model, dict(inputs)),
                "device": str(model.device),
                "threads": torch.get_num_threads(),
            },
            expected,
        )
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": scratch,
            "TRANSFORMERS_VERBOSITY": "error",
        }
        child = subprocess.run(
            [sys.executable, "-I", "-W", "ignore", reload_check.__file__, str(folder), str(expected)],
            env=environment,
            capture_output=True,
            text=True,
        )
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
        raise RuntimeError(f"the saved folder does not reload as it was saved: {lines[-1]}")
