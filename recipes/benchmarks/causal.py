"""Decoders, generation, vision, speech, encoder-decoders: what is left after conversion; writes results/causal.json.

    python recipes/benchmarks/causal.py --data-dir DIR

DIR holds data/wikitext2/{valid,test}.txt and models/tiny-llama. Needs the extra [dev]. Parts, each alone with --parts:

- language: perplexity on WikiText-2 test in sequences of 256, and on the second reading of a passage of 100 tokens
  after a gap of 30, which only distant context can lower; calibrated on WikiText-2 valid.
- distance: the second reading at gaps up to 1,400, on the model extended to 2,048 positions here (YaRN, some training).
- generation: tokens per second and bytes of state at 512, 2,048 and 8,192 tokens, on a Llama shape with random weights.
- vision: a small ViT trained here on scikit-learn's digits.
- random: Wav2Vec2 and T5 with random weights.
"""

import argparse
import gc
import json
import math
import platform
import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_primal import PrimalSettings, __version__, convert_model
from hf_primal.initialise import initialise_layers, solve_readouts
from hf_primal.layers import choose_layers
from hf_primal.modeling import configuration_primal, modeling_primal
from hf_primal.modeling.cache_primal import state_bytes
from hf_primal.modeling.primal_attention import PrimalAttention
from hf_primal.observe import Replay
from hf_primal.refine import refine
from hf_primal.surgery import build_converted

RESULTS = Path(__file__).parent / "results" / "causal.json"
PASSAGE, GAP = 100, 30
GAPS = (30, 300, 800, 1400)
LARGE = "all, window 32, rank 64 of 128 features, 600 steps"


def token_stream(path: Path, tokenizer: Any) -> Tensor:
    """All tokens of a WikiText file, headings left out, (tokens,)."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith("="))
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def blocks(stream: Tensor, count: int, length: int) -> Tensor:
    """`count` evenly spaced sequences, (count, length)."""
    step = len(stream) // count
    return torch.stack([stream[i * step : i * step + length] for i in range(count)])


def read_twice(stream: Tensor, count: int, gap: int) -> Tensor:
    """A passage, `gap` other tokens, and the passage again, (count, 2 * PASSAGE + gap)."""
    first = blocks(stream, count, PASSAGE + gap)
    return torch.cat([first, first[:, :PASSAGE]], 1)


def losses(model: Any, ids: Tensor, batch_size: int = 20) -> Tensor:
    """Negative log-likelihoods in nats, (count, tokens - 1)."""
    found = []
    with torch.no_grad():
        for part in ids.split(batch_size):
            log_p = model(input_ids=part).logits[:, :-1].log_softmax(-1)
            found.append(-log_p.gather(-1, part[:, 1:, None])[..., 0])
    return torch.cat(found)


def twice(model: Any, ids: Tensor, batch_size: int = 20) -> tuple[float, float]:
    """Mean loss of the first and of the second reading, in nats."""
    loss = losses(model, ids, batch_size)
    return float(loss[:, : PASSAGE - 1].mean()), float(loss[:, 1 - PASSAGE :].mean())


class Reader:
    """Perplexity on plain text and of the second reading, beside the teacher's."""

    def __init__(self, test: Tensor, teacher: Any, count: int = 300) -> None:
        self.plain, self.repeated = blocks(test, count, 256), read_twice(test, count, GAP)
        self.teacher: dict[str, float] = {}
        self.teacher = self(teacher)

    def __call__(self, model: Any) -> dict[str, float]:
        """Perplexities; percent above the teacher's on plain text; percent of the teacher's drop that is kept."""
        plain = float(losses(model, self.plain).mean())
        first, second = twice(model, self.repeated)
        found = {
            "perplexity": round(math.exp(plain), 2),
            "first_reading": round(math.exp(first), 2),
            "second_reading": round(math.exp(second), 2),
            "drop_nats": round(first - second, 4),
        }
        if self.teacher:
            found["perplexity_percent"] = round(100 * (math.exp(plain) / self.teacher["perplexity"] - 1), 2)
            found["drop_kept_percent"] = round(100 * found["drop_nats"] / self.teacher["drop_nats"], 1)
        return found


def fit(
    teacher: Any, layers: str, settings: PrimalSettings, batches: list[dict[str, Tensor]], seed: int
) -> tuple[dict[int, PrimalAttention], Replay]:
    """The closed form, and the calibration data to go on with."""
    chosen = choose_layers(teacher, layers)
    replay = Replay(teacher, {index: module for index, (_, module) in chosen.items()}, batches, 4_000_000_000)
    return initialise_layers(chosen, replay, settings, torch.Generator().manual_seed(seed))[0], replay


def silence(model: Any) -> None:
    """Remove the attention output of the replaced layers altogether."""
    with torch.no_grad():
        for layer in (module for module in model.modules() if isinstance(module, PrimalAttention)):
            for parameter in (layer.value_map, layer.out_map, layer.out_bias):
                parameter.zero_()


def without_far_field(
    teacher: Any, primals: dict[int, PrimalAttention], replay: Replay, settings: PrimalSettings
) -> Any:
    """The converted model with its window alone, its read-out solved again; the layers given keep their weights."""
    saved = {index: {k: v.clone() for k, v in primal.state_dict().items()} for index, primal in primals.items()}
    with torch.no_grad():
        for primal in primals.values():
            primal.We.zero_()
    solve_readouts(primals, replay)
    model = build_converted(teacher, primals, settings)
    for index, primal in primals.items():
        primal.load_state_dict(saved[index])
    return model


def language(folder: Path, seed: int, say: Callable[..., None]) -> dict[str, Any]:
    """The table of layers, windows and stages on tiny-llama."""
    path = folder / "models/tiny-llama"
    tokenizer, teacher = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()
    valid, test = (token_stream(folder / f"data/wikitext2/{name}.txt", tokenizer) for name in ("valid", "test"))
    batches = [{"input_ids": part} for part in blocks(valid, 200, 256).split(8)]
    reader = Reader(test, teacher)
    rows: dict[str, Any] = {"teacher": reader.teacher}
    say("teacher", rows["teacher"])
    cases = [(layers, PrimalSettings(window=w), 200) for layers in ("last2", "last3", "all") for w in (32, 16, 0)]
    for layers, settings, steps in [*cases, ("all", PrimalSettings(window=32, rank=64, features=128), 600)]:
        name = f"{layers}, window {settings.window}" if steps == 200 else LARGE
        begin = time.perf_counter()
        primals, replay = fit(teacher, layers, settings, batches, seed)
        row: dict[str, Any] = {"settings": asdict(settings)}
        seconds = {"closed_form": round(time.perf_counter() - begin, 1)}
        model = build_converted(teacher, primals, settings)
        row["closed form"] = reader(model)
        if settings.window == 32 and steps == 200:
            silence(model)
            row["attention output removed"] = reader(model)
        if settings.window and steps == 200:
            row["band alone"] = reader(without_far_field(teacher, primals, replay, settings))
        begin = time.perf_counter()
        refine(primals, replay, steps, torch.Generator().manual_seed(seed))
        solve_readouts(primals, replay)
        row["refined"] = reader(build_converted(teacher, primals, settings))
        rows[name] = row | {"seconds": seconds | {"refinement": round(time.perf_counter() - begin, 1)}}
        say(name, rows[name])
    return rows


def extended(path: Path, valid: Tensor, steps: int, say: Callable[..., None]) -> Any:
    """Tiny-llama with 2,048 positions: YaRN, then a short training on passages read twice at random gaps."""
    config = AutoConfig.from_pretrained(path)
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 512}
    config.max_position_embeddings, config.rope_parameters = 2048, rope
    model = AutoModelForCausalLM.from_pretrained(path, config=config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        gap = int(torch.randint(30, max(GAPS) + 1, (1,), generator=generator))
        begin = int(torch.randint(len(valid) - PASSAGE - gap, (1,), generator=generator))
        text = valid[begin : begin + PASSAGE + gap]
        ids = torch.cat([text, text[: PASSAGE + 50]])[None]
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            say(f"extension, step {step + 1}", {"loss": round(loss.item(), 3)})
    return model.eval()


def distance(folder: Path, seed: int, say: Callable[..., None]) -> dict[str, Any]:
    """The second reading at growing distance: what the teacher drops, and how much of it is kept."""
    path = folder / "models/tiny-llama"
    tokenizer = AutoTokenizer.from_pretrained(path)
    valid, test = (token_stream(folder / f"data/wikitext2/{name}.txt", tokenizer) for name in ("valid", "test"))
    torch.manual_seed(seed)
    teacher = extended(path, valid, 300, say)
    batches = [{"input_ids": ids} for gap in GAPS for ids in read_twice(valid, 16, gap).split(4)]
    texts = {gap: read_twice(test, 40, gap) for gap in GAPS}

    def drops(model: Any) -> dict[str, float]:
        readings = {gap: twice(model, ids, 6) for gap, ids in texts.items()}
        return {str(gap + PASSAGE): round(first - second, 4) for gap, (first, second) in readings.items()}

    def kept(model: Any) -> dict[str, Any]:
        found = drops(model)
        return {
            "drop_nats": found,
            "drop_kept_percent": {  # None where the teacher gains next to nothing itself
                d: round(100 * x / best, 1) if (best := rows["teacher"]["drop_nats"][d]) > 0.05 else None
                for d, x in found.items()
            },
        }

    rows: dict[str, Any] = {"teacher": {"drop_nats": drops(teacher)}}
    say("teacher", rows["teacher"])
    for layers in ("last3", "all"):
        settings = PrimalSettings(window=32)
        primals, replay = fit(teacher, layers, settings, batches, seed)
        row = {"closed form": kept(build_converted(teacher, primals, settings))}
        row["band alone"] = kept(without_far_field(teacher, primals, replay, settings))
        if layers == "all":
            refine(primals, replay, 60, torch.Generator().manual_seed(seed))
            solve_readouts(primals, replay)
            row["refined, 60 steps"] = kept(build_converted(teacher, primals, settings))
        rows[f"{layers}, window 32"] = row
        say(f"{layers}, window 32", row)
    return rows


def generation(folder: Path, seed: int, say: Callable[..., None]) -> dict[str, Any]:
    """Decoding speed and state beside the teacher's, alternating in one process; medians of five rounds."""
    shape = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}
    shape |= {"num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 8448}
    models: dict[str, Any] = {"teacher": transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()}
    for name, layers in (("last4 replaced", range(4, 8)), ("all replaced", range(8))):
        settings = asdict(PrimalSettings(window=32))
        settings.pop("ksvd_weight")
        config = configuration_primal.PrimalLlamaConfig(**shape, primal_layers=list(layers), primal=settings)
        models[name] = modeling_primal.PrimalLlamaForCausalLM(config).eval()
    rows: dict[str, Any] = {"shape": shape, "decoded_tokens": 16}
    for tokens in (512, 2048, 8192):
        ids = torch.randint(4096, (1, tokens), generator=torch.Generator().manual_seed(seed))
        row: dict[str, Any] = {name: {"prefill": [], "decode": []} for name in models}
        for turn in range(6):
            for name, model in models.items():
                prefill, decode, held = decode_once(model, ids, 16)
                if turn:  # the first is the warm-up
                    row[name]["prefill"].append(prefill)
                    row[name]["decode"].append(decode)
                row[name]["state_bytes"] = held
                gc.collect()
        for found in row.values():
            found["prefill_tokens_per_second"] = round(tokens / statistics.median(found.pop("prefill")))
            found["decode_tokens_per_second"] = round(16 / statistics.median(found.pop("decode")), 1)
        rows[str(tokens)] = row
        say(f"{tokens} tokens", row)
    return rows


def decode_once(model: Any, ids: Tensor, steps: int) -> tuple[float, float, int]:
    """Seconds of the prefill, seconds of `steps` decoded tokens, and bytes of the cache at the end."""
    with torch.no_grad():
        begin = time.perf_counter()
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        output.logits[0, -1, 0].item()  # waits for a device
        middle = time.perf_counter()
        for _ in range(steps):
            name = "cache" if "cache" in output else "past_key_values"
            token = output.logits[:, -1:].argmax(-1)
            output = model(input_ids=token, use_cache=True, **{name: output[name]})
        output.logits[0, -1, 0].item()
    return middle - begin, time.perf_counter() - middle, state_bytes(output[name])


def vision(folder: Path, seed: int, say: Callable[..., None]) -> dict[str, Any]:
    """Accuracy on held-out digits of a ViT before and after conversion of its last two layers."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    pixels = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 8 - 1
    labels = torch.tensor(digits.target)[order]
    torch.manual_seed(seed)
    config = transformers.ViTConfig(
        image_size=8, patch_size=1, num_channels=1, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=128, num_labels=10, attn_implementation="sdpa",
    )  # fmt: skip
    teacher = transformers.ViTForImageClassification(config).train()
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=1e-3)
    epochs, train = 60, 1400
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * -(-train // 64))
    for _ in range(epochs):
        for part in torch.randperm(train).split(64):
            loss = teacher(pixel_values=pixels[part], labels=labels[part]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    teacher.eval()

    def accuracy(model: Any) -> float:
        with torch.no_grad():
            return round(
                float((model(pixel_values=pixels[train:]).logits.argmax(-1) == labels[train:]).float().mean()), 4
            )

    rows: dict[str, Any] = {"test_images": len(labels) - train, "tokens": 65, "teacher": accuracy(teacher)}
    batches = [{"pixel_values": part} for part in pixels[:400].split(16)]
    for window in (16, 0):
        settings = PrimalSettings(window=window)
        row = {}
        for stage, steps in (("closed form", 0), ("refined", 200)):
            converted, report = convert_model(
                teacher, layers="last2", calibration=batches, settings=settings, refine_steps=steps, seed=seed
            )
            row[stage] = {"accuracy": accuracy(converted), "hidden_cosine": round(report.fidelity.hidden_cosine, 4)}
        rows[f"last2, window {window}"] = row
        say(f"last2, window {window}", row)
    return rows


def random_weights(folder: Path, seed: int, say: Callable[..., None]) -> dict[str, Any]:
    """Hidden-state cosine of Wav2Vec2 and T5 with random weights, all layers of the encoder's second half replaced."""
    torch.manual_seed(seed)
    speech = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 384}
    wav2vec2 = transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**speech, initializer_range=0.1)).eval()
    samples, lengths = 16000 * 3, torch.tensor([[48000], [40000], [30000], [20000]])
    sound = [
        {"input_values": torch.randn(4, samples), "attention_mask": (torch.arange(samples) < lengths).long()}
        for _ in range(8)
    ]
    text = {"d_model": 192, "d_kv": 32, "d_ff": 384, "num_layers": 4, "num_heads": 6, "vocab_size": 1000}
    t5 = transformers.T5EncoderModel(transformers.T5Config(**text)).eval()
    ids = [
        {
            "input_ids": torch.randint(3, 1000, (8, 200)),
            "attention_mask": (torch.arange(200) < torch.randint(60, 201, (8, 1))).long(),
        }
        for _ in range(12)
    ]
    rows: dict[str, Any] = {}
    for name, model, batches in (("wav2vec2", wav2vec2, sound), ("t5 encoder", t5, ids)):
        for stage, steps in (("closed form", 0), ("refined", 100)):
            _, report = convert_model(model, layers="last2", calibration=batches, refine_steps=steps, seed=seed)
            rows.setdefault(name, {})[stage] = {"hidden_cosine": round(report.fidelity.hidden_cosine, 4)}
        say(name, rows[name])
    return rows


PARTS = {
    "language": language,
    "distance": distance,
    "generation": generation,
    "vision": vision,
    "random": random_weights,
}


def main() -> None:
    """Measure the parts and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results |= {
        "command": shlex.join(["python", "recipes/benchmarks/causal.py", "--data-dir", "DIR"]),
        "seed": options.seed,
        "threads": options.threads,
        "device": "cpu",
        "machine": platform.machine(),
        "versions": {
            "hf_primal": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    for part in options.parts:
        results[part] = PARTS[part](
            options.data_dir, options.seed, lambda name, row, part=part: print(part, "|", name, "|", row, flush=True)
        )
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
