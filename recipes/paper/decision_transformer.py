"""Decision transformer against Primal.+DT, offline, on CartPole: mean return of 20 episodes, three seeds.

    pip install -e ".[paper]"
    python recipes/paper/decision_transformer.py

The paper uses D4RL, whose data cannot be had offline; here a scripted policy plays gymnasium's CartPole-v1, in every
episode with another share of random actions, so that returns range from poor to the best possible 500. The models see
position and angle but not their speeds, which they have to work out from earlier steps. They are
`DecisionTransformerModel` and its Primal form with the last layer replaced (causal preset: running means).
"""

import argparse
import statistics
import time
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from results import save
from torch import Tensor
from tqdm import trange
from transformers import AutoModel

from hf_primal import PrimalDecisionTransformerConfig

CONTEXT, LIMIT, BATCH = 20, 500, 64
SEEN = [0, 2]  # position and angle, of position, speed, angle and turning speed
ROWS: dict[str, tuple[list[int], float]] = {"DT": ([], 0.0), "Primal.+DT": ([2], 0.05)}  # replaced layers, eta


def scripted(states: np.ndarray) -> np.ndarray:
    """Push towards where the pole falls: (B, 4) to 0 or 1 (B,)."""
    position, speed, angle, turning = states.T
    return (angle + 0.5 * turning + 0.02 * position + 0.05 * speed > 0).astype(np.int64)


def episodes(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Episodes of the scripted policy with 0 to 80 percent of its actions random: states, actions, returns to go."""
    draw, found = np.random.default_rng(seed), []
    env = gymnasium.make("CartPole-v1")
    for number in trange(count, desc="episodes"):
        noise, done = draw.uniform(0.0, 0.8), False
        state, _ = env.reset(seed=seed * count + number)
        states, actions = [], []
        while not done:
            action = int(draw.integers(2)) if draw.random() < noise else int(scripted(state[None])[0])
            states.append(state[SEEN])
            actions.append(action)
            state, _, ended, cut, _ = env.step(action)
            done = ended or cut
        left = torch.arange(len(states), 0, -1, dtype=torch.float32)  # every step is worth 1
        found.append({"states": torch.tensor(np.array(states)), "actions": torch.tensor(actions), "left": left})
    return found


def windows(data: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of parts of CONTEXT steps, padded on the left, episodes drawn by their length."""
    lengths = torch.tensor([len(episode["actions"]) for episode in data], dtype=torch.float32)
    rows: dict[str, list[Tensor]] = {"states": [], "actions": [], "left": [], "timesteps": [], "valid": []}
    for index in torch.multinomial(lengths, BATCH, replacement=True):
        episode = data[int(index)]
        end = int(torch.randint(1, len(episode["actions"]) + 1, ()))
        begin, pad = max(end - CONTEXT, 0), max(CONTEXT - end, 0)
        for name in ("states", "actions", "left"):
            part = episode[name][begin:end]
            rows[name].append(F.pad(part, (0, 0, pad, 0) if part.ndim == 2 else (pad, 0)))
        rows["timesteps"].append(F.pad(torch.arange(begin, end), (pad, 0)))
        rows["valid"].append(torch.arange(CONTEXT) >= pad)
    return {name: torch.stack(parts) for name, parts in rows.items()}


def inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch as the model takes it; returns are in units of 500."""
    return {
        "states": batch["states"],
        "actions": F.one_hot(batch["actions"], 2).float(),
        "returns_to_go": batch["left"][..., None] / LIMIT,
        "timesteps": batch["timesteps"],
        "attention_mask": batch["valid"].long(),
    }


def train(name: str, data: list[dict[str, Tensor]], steps: int, seed: int) -> tuple[Any, float]:
    """The trained model, and seconds for 1,000 steps."""
    layers, eta = ROWS[name]
    torch.manual_seed(seed)
    config = PrimalDecisionTransformerConfig(
        state_dim=len(SEEN),
        act_dim=2,
        max_ep_len=LIMIT,
        hidden_size=64,
        n_layer=3,
        n_head=2,
        action_tanh=False,  # two logits
        primal_layers=layers,
        primal={"rank": 32, "feature_map": "cosine", "weights": "fixed", "readout": "scores"},
        ksvd_weight=eta,
    )
    model = AutoModel.from_config(config)
    model.expects_labels = False  # the loss is worked out here
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 100, 1.0))
    began = time.perf_counter()
    for _ in trange(steps, desc=f"{name}, seed {seed}"):
        batch = windows(data)
        predicted = model.train()(**inputs(batch)).action_preds
        loss = F.cross_entropy(predicted[batch["valid"]], batch["actions"][batch["valid"]])
        (loss + model.last_losses.get("loss_ksvd", 0.0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval(), round((time.perf_counter() - began) * 1000 / steps, 1)


@torch.no_grad()
def play(model: Any, count: int, seed: int, target: float = LIMIT) -> list[float]:
    """Returns of episodes that the model plays side by side, told to reach `target`."""
    envs = [gymnasium.make("CartPole-v1") for _ in range(count)]
    states = [[env.reset(seed=10_000 * (seed + 1) + i)[0][SEEN]] for i, env in enumerate(envs)]
    actions: list[list[int]] = [[] for _ in envs]
    returns, playing = [0.0] * count, list(range(count))
    for step in range(LIMIT):
        begin = max(step + 1 - CONTEXT, 0)
        taken = torch.arange(begin, step + 1)
        batch = {
            "states": torch.tensor(np.array([states[i][begin:] for i in playing])),
            "actions": torch.tensor([[*actions[i][begin:], 0] for i in playing]),
            "left": (target - taken.float()).clamp(min=1.0).expand(len(playing), -1),
            "timesteps": taken.expand(len(playing), -1),
            "valid": torch.ones(len(playing), len(taken), dtype=torch.bool),
        }
        chosen = model(**inputs(batch)).action_preds[:, -1].argmax(-1).tolist()
        for i, action in zip(list(playing), chosen, strict=True):
            state, reward, ended, cut, _ = envs[i].step(action)
            states[i].append(state[SEEN])
            actions[i].append(action)
            returns[i] += float(reward)
            if ended or cut:
                playing.remove(i)
        if not playing:
            break
    return returns


def main() -> None:
    """Both models, all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    data = episodes(options.episodes, 0)
    rows: dict[str, Any] = {}
    for name in ROWS:
        runs, times = [], []
        for seed in range(options.seeds):
            model, seconds = train(name, data, options.steps, seed)
            runs.append(round(statistics.mean(play(model, 20, seed)), 1))
            times.append(seconds)
        spread = round(statistics.stdev(runs), 1) if len(runs) > 1 else 0.0
        rows[name] = {"mean_return": round(statistics.mean(runs), 1), "standard_deviation": spread, "seeds": runs}
        rows[name]["seconds_per_1000_steps"] = statistics.median(times)
        print(name, rows[name])
    returns = [float(len(episode["actions"])) for episode in data]
    told = {"episodes": len(data), "mean_return": round(statistics.mean(returns), 1), "best_return": max(returns)}
    save({"rows": rows, "data": told, "steps": options.steps, "gymnasium": gymnasium.__version__})


if __name__ == "__main__":
    main()
