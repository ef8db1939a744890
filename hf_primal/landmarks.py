"""Landmarks: where the features look, by k-means among the queries and keys that calibration saw.

Source: ours.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_primal.modeling.primal_attention import PrimalAttention
from hf_primal.moments import scaled_states
from hf_primal.observe import States


@dataclass
class LandmarkSample:
    """Random scaled queries and keys of one layer, (H, M, d) each, as its feature maps meet them."""

    primal: PrimalAttention
    per_batch: int
    generator: torch.Generator

    def __post_init__(self) -> None:
        """Start empty."""
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []

    def update(self, states: States) -> None:
        """Take at most `per_batch` valid tokens of one call."""
        where = states.valid.flatten().nonzero().squeeze(-1)
        where = where[torch.randperm(len(where), generator=self.generator)[: self.per_batch].to(where.device)]
        averaged = self.primal.averaged(*scaled_states(states), states.valid, states.causal)
        for kept, points in zip((self.queries, self.keys), averaged, strict=True):
            kept.append(points.transpose(0, 1).flatten(1, 2)[:, where].float())


def k_means(points: Tensor, clusters: int, generator: torch.Generator, iterations: int = 20) -> Tensor:
    """Cluster centres of each head's points: Lloyd's algorithm from a k-means++ start.

    Args:
        points: (H, M, d) with M >= 1; with fewer points than clusters, points are repeated with a little noise.
        clusters: centres per head, >= 1.
        generator: CPU generator for the start.
        iterations: of Lloyd's algorithm; an empty cluster keeps its centre.

    Returns:
        (H, clusters, d).
    """
    short = -(-clusters // points.shape[1])
    if short > 1:
        noise = torch.randn((points.shape[0], points.shape[1] * short, points.shape[2]), generator=generator)
        points = points.repeat(1, short, 1) + noise.to(points) * points.std().nan_to_num(0.0).clamp(min=1e-2) * 0.1
    centres = points[:, :0]
    distance = torch.ones_like(points[..., 0])
    for _ in range(clusters):  # the next one with a chance that grows with the squared distance from those chosen
        reach = distance.cumsum(-1)
        draw = torch.rand(len(points), 1, generator=generator).to(points.device) * reach[:, -1:]
        chosen = torch.searchsorted(reach, draw).clamp(max=points.shape[1] - 1)
        centre = points.gather(1, chosen[..., None].expand(-1, -1, points.shape[-1]))
        centres = torch.cat([centres, centre], 1)
        nearest = (points - centre).square().sum(-1)
        distance = nearest if len(centres[0]) == 1 else torch.minimum(distance, nearest)
    for _ in range(iterations):
        member = torch.zeros(*points.shape[:2], clusters, device=points.device)
        member.scatter_(-1, torch.cdist(points, centres).argmin(-1, keepdim=True), 1.0)
        size = member.sum(1).unsqueeze(-1)
        centres = torch.where(size > 0, (member.mT @ points) / size.clamp(min=1.0), centres)
    return centres


def place_landmarks(primal: PrimalAttention, sample: LandmarkSample) -> None:
    """Set the landmarks of one layer, and the shift that gives each key feature mean 1 on the sample."""
    queries, keys = torch.cat(sample.queries, 1), torch.cat(sample.keys, 1)
    count = primal.key_landmarks.shape[1]
    key_landmarks, query_landmarks = (k_means(points, count, sample.generator) for points in (keys, queries))
    shift = (keys @ query_landmarks.mT).logsumexp(1, keepdim=True) - math.log(keys.shape[1])
    with torch.no_grad():
        primal.key_landmarks.copy_(key_landmarks)
        primal.query_landmarks.copy_(query_landmarks)
        primal.shift.copy_(shift)
