"""Whole attention blocks (with projections) of the same shape, to be timed side by side: ours, softmax and peers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_primal import PrimalAttention, PrimalSettings
from hf_primal.modeling.primal_band import Windows, in_sight

PEERS = ("performer-pytorch", "nystrom-attention", "linear-attention-transformer")


class Projected(nn.Module):
    """q, k, v and output projections around what attends: (B, N, width) to (B, N, width).

    Args:
        width: of the states.
        heads: H, which divides it.
        attend: takes q, k and v, (B, H, N, .) each, and gives (B, N, H, width / H).
        reads_values: whether v is projected; else it is the states.
        features: outputs of the projections of q and k per head, where they are not width / H.
    """

    def __init__(
        self, width: int, heads: int, attend: nn.Module, reads_values: bool = True, features: int | None = None
    ) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        outputs = width if features is None else heads * features
        self.q, self.k = nn.Linear(width, outputs), nn.Linear(width, outputs)
        self.v = nn.Linear(width, width) if reads_values else None
        self.out = nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        """See the class."""
        q, k, v = (states if x is None else x(states) for x in (self.q, self.k, self.v))
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        return self.out(self.attend(q, k, v).flatten(2))


class Bare(nn.Module):
    """What attends without projections: the states are q, k and v, (B, N, width) to (B, N, width)."""

    def __init__(self, heads: int, attend: nn.Module) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend

    def forward(self, states: Tensor) -> Tensor:
        """See the class."""
        parts = states.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.attend(parts, parts, parts).flatten(2)


class Softmax(nn.Module):
    """Attention as Transformers has it, `eager` or `sdpa`: (B, H, N, d) to (B, N, H, d)."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.eager = eager

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See the class."""
        if self.eager:
            output = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        else:
            output = F.scaled_dot_product_attention(q, k, v)
        return output.transpose(1, 2)


class Nothing(nn.Module):
    """No attention: what is left is the time of the projections, which no attention can go below."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, N, d) each to (B, N, H, d)."""
        return v.transpose(1, 2)


class SlidingWindow(nn.Module):
    """Softmax over the keys at a distance below `window`, by chunks in SDPA: (B, H, N, d) to (B, N, H, d)."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See the class."""
        batch, heads, tokens, _ = q.shape
        layout = Windows(tokens, tokens, max(32, self.window), self.window, causal=False)
        offset = layout.offset(q.device)
        allowed = layout.seen(torch.ones(1, tokens, dtype=torch.bool, device=q.device)).transpose(0, 1) & in_sight(
            offset, causal=False, horizon=self.window
        )
        keys, values = (layout.windows(layout.of_keys(x)).mT.unflatten(0, (-1, layout.rows)) for x in (k, v))
        rows = layout.of_rows(q, heads).unflatten(0, (-1, layout.rows)).squeeze(2)
        allowed = allowed | (offset == 0)  # chunks of padding see themselves
        output = F.scaled_dot_product_attention(rows, keys, values, allowed)
        return layout.to_rows(output.flatten(0, 1).unsqueeze(1), batch, tokens).transpose(1, 2)


class OfficialPrimal(nn.Module):
    """The official module, literally, from its description: einsums per head, f(X) = the layer's input by channels.

    What `v` is here is the block's input. The scores and the loss terms are worked out in training, as there.
    """

    def __init__(self, heads: int, head_dim: int, rank: int, rank_multi: int = 10) -> None:
        super().__init__()
        self.We = nn.Parameter(nn.init.orthogonal_(torch.empty(heads, rank * rank_multi, rank)))
        self.Wr = nn.Parameter(nn.init.orthogonal_(torch.empty(heads, rank * rank_multi, rank)))
        self.Lambda = nn.Parameter(torch.rand(heads, rank))
        self.concate_weight = nn.Linear(2 * rank, head_dim)
        self.loss = torch.zeros(())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, N, d) each to (B, N, H, d)."""
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        x = v.transpose(-1, -2)
        x = x[..., torch.linspace(0, x.shape[-1] - 1, self.We.shape[1], dtype=torch.int64)]
        We, Wr = (torch.einsum("bhpn,hns->bhps", x, W) for W in (self.We, self.Wr))
        e, r = torch.einsum("bhnp,bhps->bhns", q, We), torch.einsum("bhnp,bhps->bhns", k, Wr)
        if self.training:
            terms = [(torch.einsum("bhns,hs->bhns", score, self.Lambda) ** 2).sum(-1).mean() / 2 for score in (e, r)]
            self.loss = sum(terms) - torch.einsum("hns,hns->h", self.We, self.Wr).mean()
        return self.concate_weight(torch.cat((e, r), -1)).transpose(1, 2)


def primal(heads: int, head_dim: int, settings: PrimalSettings, folded: tuple[str, ...] = ()) -> PrimalAttention:
    """A layer of ours with some values."""
    layer = PrimalAttention(heads, head_dim, settings, folded)
    layer.load_state_dict({name: value.clone() for name, value in layer.initial_values().items()})
    return layer


def peer(name: str, width: int, heads: int) -> nn.Module:
    """A block of another package, at its defaults for this shape."""
    if name == "performer-pytorch":
        from performer_pytorch import SelfAttention as Performer

        return Performer(width, heads=heads, dim_head=width // heads)
    if name == "nystrom-attention":
        from nystrom_attention import NystromAttention

        return NystromAttention(width, dim_head=width // heads, heads=heads, num_landmarks=64)
    from linear_attention_transformer.linear_attention_transformer import SelfAttention as LinearAttention

    return LinearAttention(width, heads)


def peer_between_projections(name: str, heads: int, dim: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A peer's attention for a model with projections: q, k and v, (B, H, N, d) each, to (B, N, H, d)."""
    if name.startswith("sliding window"):
        return SlidingWindow(int(name.split()[-1]))
    if name == "performer-pytorch":
        from performer_pytorch import FastAttention

        attend = FastAttention(dim)
        return lambda q, k, v: attend(q, k, v).transpose(1, 2)
    if name == "nystrom-attention":
        from nystrom_attention import NystromAttention

        nystrom = NystromAttention(heads * dim, dim_head=dim, heads=heads, num_landmarks=64, residual=False)
        nystrom.to_qkv = nystrom.to_out = nn.Identity()
        return lambda q, k, v: nystrom(torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1)).unflatten(
            -1, (heads, dim)
        )
    from linear_attention_transformer.linear_attention_transformer import linear_attn

    return lambda q, k, v: linear_attn(q, k, v).transpose(1, 2)


def blocks(width: int, heads: int) -> dict[str, Callable[[], nn.Module]]:
    """What there is to compare, by name; each call builds one with random weights."""
    dim = width // heads
    paper = PrimalSettings.paper(rank=20)

    def around(attend: Callable[[], nn.Module], reads_values: bool = True) -> Callable[[], nn.Module]:
        return lambda: Projected(width, heads, attend(), reads_values)

    return {
        "softmax eager": around(lambda: Softmax(eager=True)),
        "softmax SDPA": around(lambda: Softmax(eager=False)),
        "projections alone": around(Nothing),
        "sliding window 16": around(lambda: SlidingWindow(16)),
        "sliding window 128": around(lambda: SlidingWindow(128)),
        "official Primal (port)": around(lambda: OfficialPrimal(heads, dim, 20), reads_values=False),
        "ours, preset paper": around(lambda: primal(heads, dim, paper), reads_values=False),
        "official Primal (port), no projections": lambda: Bare(heads, OfficialPrimal(heads, dim, 20)),
        "ours, preset paper, no projections": lambda: Bare(heads, primal(heads, dim, paper)),
        "ours, default": around(lambda: primal(heads, dim, PrimalSettings())),
        "ours, window 0": around(lambda: primal(heads, dim, PrimalSettings(window=0))),
        "ours, folded": around(lambda: primal(heads, dim, PrimalSettings(), ("value",))),
        "ours, window 0, folded": lambda: Projected(
            width,
            heads,
            primal(heads, dim, PrimalSettings(window=0), ("query", "key", "value")),
            features=PrimalSettings().features,
        ),
        **{name: (lambda name=name: peer(name, width, heads)) for name in PEERS},
    }
