"""ListOps of the Long Range Arena, generated here: accuracy, time and memory of softmax, Primal.+ and Primal models.

    python recipes/paper/listops.py

The paper's size is 500 to 2,000 tokens, depth 10, 96,000 rows and 5,000 steps; the defaults here are smaller, so that
two CPU cores finish the three models in half an hour. Accuracies at this size do not compare with the paper's;
the ratios of time and memory do, length by length.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from typing import Any

import torch
import transformers
from results import save
from torch import Tensor
from tqdm import trange

from hf_primal import PrimalBertConfig

WORDS = ["[PAD]", *map(str, range(10)), "[MIN", "[MAX", "[MED", "[SM", "]"]
MEANING = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(sorted(values)[len(values) // 2] + sorted(values)[(len(values) - 1) // 2]) // 2,
    "[SM": lambda values: sum(values) % 10,
}
ROWS: dict[str, dict[str, Any]] = {  # replaced layers, s and eta of run_tasks.sh; the paper's accuracy at full size
    "softmax": {"layers": [], "rank": 20, "eta": 0.0, "paper": 0.371},
    "Primal.+": {"layers": [1], "rank": 30, "eta": 0.05, "paper": 0.373},
    "Primal": {"layers": [0, 1], "rank": 20, "eta": 0.1, "paper": 0.373},
}


def expression(draw: random.Random, depth: int, arguments: int) -> tuple[list[str], int]:
    """A random expression, as words, and its value: the published grammar.

    Args:
        draw: source of randomness.
        depth: how many levels of lists may still open.
        arguments: the most that a list has; the least is 2.
    """
    if depth == 0 or draw.random() > 0.25:
        value = draw.randrange(10)
        return [str(value)], value
    parts = [expression(draw, depth - 1, arguments) for _ in range(draw.randint(2, arguments))]
    name = draw.choice(list(MEANING))
    return [name, *(word for words, _ in parts for word in words), "]"], MEANING[name]([value for _, value in parts])


def rows(count: int, shortest: int, longest: int, seed: int) -> tuple[Tensor, Tensor]:
    """Distinct expressions as ids (count, longest), 0 behind their end, and their values (count,)."""
    draw, found = random.Random(seed), {}
    ids = {word: i for i, word in enumerate(WORDS)}
    while len(found) < count:
        words, value = expression(draw, 10, 10)
        if shortest <= len(words) <= longest:
            found[tuple(ids[word] for word in words)] = value
    tokens = torch.zeros(count, longest, dtype=torch.int64)
    for i, row in enumerate(found):
        tokens[i, : len(row)] = torch.tensor(row)
    return tokens, torch.tensor(list(found.values()))


def train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One model: accuracy on 1,000 rows of the test part, seconds for 1,000 steps, and the process's peak of memory."""
    row = ROWS[name]
    torch.manual_seed(options.seed)
    config = PrimalBertConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=options.longest,
        num_labels=10,
        primal_layers=row["layers"],
        primal={"rank": row["rank"], "feature_map": "cosine", "weights": "sampled", "readout": "scores"},
        ksvd_weight=row["eta"],
    )
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
    tokens, values = rows(options.rows, options.shortest, options.longest, options.seed)
    picked = torch.randint(options.rows, (options.steps, 32))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    for step in trange(options.steps, desc=name):
        batch = tokens[picked[step]]
        batch = batch[:, : int((batch > 0).sum(-1).max())]
        model.train()
        model(input_ids=batch, attention_mask=batch > 0, labels=values[picked[step]]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    tokens, values = rows(1000, options.shortest, options.longest, options.seed + 1)
    with torch.no_grad():
        guesses = [model.eval()(input_ids=x, attention_mask=x > 0).logits.argmax(-1) for x in tokens.split(50)]
    return {
        "accuracy": float((torch.cat(guesses) == values).float().mean()),
        "majority": float(values.bincount().max() / len(values)),
        "seconds_per_1000_steps": round(1000 * seconds / options.steps, 1),
        "peak_mib": round(peak / 1024, 1),
        "paper": row["paper"],
    }


def main() -> None:
    """All models, each in a process of its own, or one in this process with --model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shortest", type=int, default=100)
    parser.add_argument("--longest", type=int, default=500)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=list(ROWS))
    options = parser.parse_args()
    if options.model:
        print(json.dumps(train(options.model, options)))
        return
    found = {}
    for name in ROWS:
        call = [sys.executable, __file__, *sys.argv[1:], "--model", name]
        found[name] = json.loads(subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True).stdout)
    save(
        {
            "rows": found,
            "size": {name: getattr(options, name) for name in ("shortest", "longest", "rows", "steps", "seed")},
        }
    )
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
