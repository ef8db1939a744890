"""JapaneseVowels, a row of the paper's table of time series: accuracy of Primal, Primal.+ and softmax models.

    pip install -e ".[paper]"
    python recipes/paper/japanese_vowels.py

Two post-LN blocks of 512 (8 heads) on 12 channels, RAdam 1e-3, 100 epochs: the official setting, in ordinary classes.
As there, the test part is measured at epochs 0, 1 and every second one; the best and the last are noted. Runs that the
result file holds are not made again; delete it to begin anew.
"""

import argparse
import json
import math
import statistics
import time
from typing import Any

import torch
from results import FOLDER, save
from sktime.datasets import load_japanese_vowels
from torch import Tensor, nn
from tqdm import tqdm

from hf_primal import PrimalAttention, PrimalBertConfig, PrimalBertModel

WIDTH, LENGTH, CLASSES, CHANNELS = 512, 26, 9, 12
ROWS: dict[str, dict[str, Any]] = {  # replaced layers, s and eta of run_tasks.sh
    "Primal": {"layers": [0, 1], "rank": 40, "eta": 0.5, "paper": 0.984},
    "Primal.+": {"layers": [1], "rank": 30, "eta": 0.2, "paper": 0.989},
    "softmax": {"layers": [], "rank": 30, "eta": 0.0, "paper": 0.987},
}


class SeriesEmbeddings(nn.Module):
    """Channels (B, N, 12) to states (B, N, 512), in the place of BERT's embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = nn.Linear(CHANNELS, WIDTH)
        self.positions = nn.Parameter(torch.empty(LENGTH, WIDTH).uniform_(-0.02, 0.02))
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs_embeds: Tensor, **unused: Any) -> Tensor:
        """See the class."""
        return self.dropout(self.channels(inputs_embeds) * math.sqrt(WIDTH) + self.positions)


class SeriesClassifier(nn.Module):
    """`PrimalBertModel` on a series, then its states, without those of padding, in one linear layer."""

    def __init__(self, layers: list[int], rank: int, eta: float) -> None:
        super().__init__()
        primal = {"rank": rank, "feature_map": "cosine", "weights": "sampled", "readout": "scores"}
        primal |= {"rank_multi": 1, "shared_out_map": True}
        config = PrimalBertConfig(
            vocab_size=1,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=8,
            intermediate_size=2048,
            primal_layers=layers,
            primal=primal,
            ksvd_weight=eta,
        )
        self.encoder = PrimalBertModel(config, add_pooling_layer=False)
        self.encoder.embeddings = SeriesEmbeddings()
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1))
        self.classifier = nn.Linear(LENGTH * WIDTH, CLASSES)
        self.encoder.expects_labels = False
        self.official_start()

    @torch.no_grad()
    def official_start(self) -> None:
        """PyTorch's own for linear layers and W_o; f(X) = X; We and Wr of all heads as one orthogonal matrix of H rows.

        Officially We and Wr have a row for each of the 26 steps. Ours have more, of which the same 26 are used, and
        start with as large a norm in these.
        """
        for module in self.encoder.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
            elif isinstance(module, PrimalAttention):
                for weights in (module.We, module.Wr):
                    nn.init.orthogonal_(weights).mul_((weights.shape[1] / LENGTH) ** 0.5)
                bound = module.out_map.shape[1] ** -0.5
                module.out_map.uniform_(-bound, bound)
                module.out_bias.uniform_(-bound, bound)
        for index in self.encoder.config.primal_layers:
            identity = self.encoder.encoder.layer[index].attention.self.value.requires_grad_(False)
            nn.init.eye_(identity.weight)
            nn.init.zeros_(identity.bias)

    def forward(self, series: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, 9) of series (B, 26, 12), and the KSVD loss; attention sees padding, as it does officially."""
        states = self.head(self.encoder(inputs_embeds=series).last_hidden_state) * valid.unsqueeze(-1)
        ksvd = self.encoder.last_losses.get("loss_ksvd", series.new_zeros(()))
        return self.classifier(states.flatten(1)), ksvd


def load() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Series (n, 26, 12), validity (n, 26) and classes (n,) of train and test, in the units of train."""
    parts = {name: load_japanese_vowels(split=name, return_type="df-list") for name in ("train", "test")}
    steps = torch.cat([torch.tensor(frame.to_numpy()) for frame in parts["train"][0]])
    mean, deviation = steps.mean(0), steps.std(0)
    data = {}
    for name, (frames, classes) in parts.items():
        series, valid = torch.zeros(len(frames), LENGTH, CHANNELS), torch.zeros(len(frames), LENGTH)
        for i, frame in enumerate(frames):
            values = ((torch.tensor(frame.to_numpy()) - mean) / deviation)[:LENGTH].float()
            series[i, : len(values)], valid[i, : len(values)] = values, 1.0
        data[name] = series, valid, torch.tensor([int(label) - 1 for label in classes])
    return data


@torch.no_grad()
def accuracy(model: SeriesClassifier, series: Tensor, valid: Tensor, classes: Tensor) -> float:
    """Of the test part."""
    return float((model.eval()(series, valid)[0].argmax(-1) == classes).float().mean())


def train(row: dict[str, Any], seed: int, epochs: int, data: dict[str, Any], name: str) -> dict[str, Any]:
    """One run: accuracy after epochs 0, 1 and every second one, and seconds."""
    torch.manual_seed(seed)
    model = SeriesClassifier(row["layers"], row["rank"], row["eta"])
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
    began, found, losses = time.perf_counter(), [], []
    for epoch in tqdm(range(epochs), desc=f"{name}, seed {seed}"):
        model.train()
        for rows in torch.randperm(len(data["train"][0])).split(16):
            series, valid, classes = (x[rows] for x in data["train"])
            logits, ksvd = model(series, valid)
            loss = nn.functional.cross_entropy(logits, classes) + ksvd
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 4.0)
            optimizer.step()
            losses.append(float(ksvd.detach()))
        if epoch in (0, 1) or epoch % 2 or epoch == epochs - 1:
            found.append(accuracy(model, *data["test"]))
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {
        "best": max(found),
        "last": found[-1],
        "ksvd_loss": [losses[0], losses[-1]],
        "parameters": parameters,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """All runs; each is added to the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    options = parser.parse_args()
    torch.set_flush_denormal(True)  # gradients of a model that has converged are denormal, which is slow on a CPU
    data, path = load(), FOLDER / "japanese_vowels.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    for seed in range(options.seeds):
        for name in options.rows:
            row = rows.setdefault(name, {"paper": ROWS[name]["paper"], "runs": {}})
            if str(seed) in row["runs"]:
                continue
            row["runs"][str(seed)] = train(ROWS[name], seed, options.epochs, data, name)
            for key in ("best", "last"):
                row[key] = round(statistics.mean(run[key] for run in row["runs"].values()), 4)
            seconds = sum(run["seconds"] for each in rows.values() for run in each["runs"].values())
            save({"rows": rows, "epochs": options.epochs}, seconds / 60)


if __name__ == "__main__":
    main()
