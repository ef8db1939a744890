"""Language modelling at small scale, GPT-2's shape: perplexity, time and memory of softmax, Primal.+ and our default.

    python recipes/paper/language_model.py --data-dir DIR

DIR holds wikitext2/{valid,test}.txt. The paper trains 6 layers of 512 on WikiText-103 for 150,000 updates; here 4
layers of 128 see the small WikiText-2 validation part a few times, with a tokenizer of 4,096 pieces trained on it.
Perplexities compare with each other only.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from results import save
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from tqdm import trange
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from hf_primal import PrimalGPT2Config

VOCABULARY, TOKENS, BATCH = 4096, 256, 8
PAPER = {"rank": 30, "feature_map": "cosine", "weights": "fixed", "readout": "scores"}
ROWS: dict[str, dict[str, Any]] = {  # replaced layers, the layer, eta; the paper's perplexity on WikiText-103
    "softmax": {"layers": [], "primal": PAPER, "eta": 0.0, "paper": 33.0},
    "Primal.+": {"layers": [3], "primal": PAPER, "eta": 0.1, "paper": 31.0},
    "our default, last layer": {"layers": [3], "primal": {}, "eta": 0.001, "paper": None},
}


def sequences(folder: Path) -> tuple[Tensor, Tensor]:
    """Token ids of the validation and test parts, (sequences, 256) each; the tokenizer is trained on the first."""
    paths = [folder / "wikitext2" / f"{part}.txt" for part in ("valid", "test")]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(paths[0])], vocab_size=VOCABULARY, show_progress=False)
    parts = (torch.tensor(tokenizer.encode(path.read_text(encoding="utf-8")).ids) for path in paths)
    first, second = (ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS) for ids in parts)
    return first, second


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate one model in this process."""
    row = ROWS[name]
    data, test = sequences(options.data_dir)
    torch.manual_seed(options.seed)
    config = PrimalGPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        n_embd=128,
        n_layer=4,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
        primal_layers=row["layers"],
        primal=row["primal"],
        ksvd_weight=row["eta"],
    )
    model = AutoModelForCausalLM.from_config(config)
    steps = options.epochs * (len(data) // BATCH)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    for _ in trange(options.epochs, desc=name):
        for rows in torch.randperm(len(data)).split(BATCH)[: len(data) // BATCH]:
            model.train()(input_ids=data[rows], labels=data[rows]).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    with torch.no_grad():
        model.eval()
        losses = [float(model(input_ids=part, labels=part).loss) * len(part) for part in test.split(BATCH)]
    return {
        "perplexity": round(math.exp(sum(losses) / len(test)), 2),
        "seconds_per_1000_steps": round(1000 * seconds / steps, 1),
        "peak_mib": round(peak / 1024, 1),
        "steps": steps,
        "paper": row["paper"],
    }


def main() -> None:
    """All models, each in a process of its own, or one in this process with --model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=list(ROWS))
    options = parser.parse_args()
    if options.model:
        print(json.dumps(run(options.model, options)))
        return
    found = {}
    for name in ROWS:
        call = [sys.executable, __file__, *sys.argv[1:], "--model", name]
        found[name] = json.loads(subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True).stdout)
        print(name, found[name])
    size = {"layers": 4, "width": 128, "tokens": TOKENS, "batch": BATCH, "epochs": options.epochs}
    save({"rows": found, "size": size, "seed": options.seed})


if __name__ == "__main__":
    main()
