"""Folding: the linear maps at either end of a replaced layer's attention go into the projections beside them.

Where q and k reach the layer straight from linear projections, these can give the logits of the landmarks, p a head in
the place of d; and W_v goes into the value projection. The model computes what it did, to rounding, in less time.
Source: ours.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .primal_attention import PrimalAttention

NAMES = {
    "query": ("query", "q_proj", "q_lin", "q"),
    "key": ("key", "k_proj", "k_lin", "k"),
    "value": ("value", "v_proj", "v_lin", "v"),
}


def projections(module: nn.Module) -> dict[str, str]:
    """The names of an attention module's linear projections, by role."""
    found = {}
    for role, names in NAMES.items():
        linear = [name for name in names if type(getattr(module, name, None)) is nn.Linear]
        if linear:
            found[role] = linear[0]
    return found


def widened(linear: nn.Linear, outputs: int, bias: bool) -> nn.Linear:
    """An empty projection in the place of another, with other outputs."""
    like: Any = {"device": linear.weight.device, "dtype": linear.weight.dtype}
    return nn.Linear(linear.in_features, outputs, bias=bias, **like)


def make_room(module: nn.Module, folded: dict[str, str]) -> None:
    """Give a module projections of the folded shapes, with values yet to be loaded."""
    primal: Any = module.primal
    for role in ("query", "key"):
        if role in folded:
            old = getattr(module, folded[role])
            outputs = primal.settings.features * len(primal.We)
            setattr(module, folded[role], widened(old, outputs, role == "key" or old.bias is not None))


@torch.no_grad()
def observed(module: Any, states: Tensor) -> tuple[list[Tensor], float | None, Tensor]:
    """Q, k and v, (B, heads, N, d), and the scaling that a module's attention gets of hidden states; its output."""
    seen: list[Any] = []
    handle = module.primal.register_forward_pre_hook(lambda _, args: seen.append(args))
    try:
        output = module(states)
    finally:
        handle.remove()
    (args,) = seen
    return list(args[:3]), args[4], output[0] if isinstance(output, tuple) else output


def as_heads(flat: Tensor, heads: int) -> Tensor:
    """(B, N, heads d) to (B, heads, N, d)."""
    return flat.unflatten(-1, (heads, -1)).transpose(1, 2)


def plain_roles(module: Any, names: dict[str, str], states: Tensor, seen: list[Tensor]) -> list[str]:
    """Which of q, k and v can take something in, given what the layer got of hidden states."""
    settings, heads = module.primal.settings, len(module.primal.We)
    q, k, v = seen
    plain = {
        role: role in names and torch.equal(as_heads(getattr(module, names[role])(states), x.shape[1]), x)
        for role, x in zip(NAMES, (q, k, v), strict=True)
    }
    roles = ["value"] if plain["value"] and settings.readout == "values" and v.shape[1] == heads else []
    landmarks = plain["query"] and plain["key"] and settings.feature_map == "landmark" and not settings.window
    if landmarks and heads * settings.features % q.shape[-1] == 0:  # modules view what comes in heads of d
        roles += ["query", "key"]
    return roles


def multiplied(old: nn.Linear, maps: Tensor, shift: Tensor | None, groups: int) -> nn.Linear:
    """A projection followed by a map of every head, as one projection.

    Args:
        old: to G heads of d.
        maps: (H, outputs, d), in float64.
        shift: (H, outputs, 1), taken off the result; None is 0.
        groups: G, which divides H.
    """
    heads = len(maps)
    new = widened(old, heads * maps.shape[1], shift is not None or old.bias is not None)
    maps = maps.unflatten(0, (groups, -1))
    new.weight.copy_((maps @ old.weight.double().unflatten(0, (groups, 1, -1))).flatten(0, 2))
    if new.bias is not None:
        bias = maps.new_zeros(heads, maps.shape[2], 1) if shift is None else -shift
        if old.bias is not None:
            bias = bias + (maps @ old.bias.double().view(groups, 1, -1, 1)).flatten(0, 1)
        new.bias.copy_(bias.flatten())
    return new.requires_grad_(old.weight.requires_grad)


@torch.no_grad()
def fold_module(module: Any) -> dict[str, str]:
    """Fold one attention module in place; which projections took something in, by role.

    Raises:
        ValueError: nothing can be folded here.
    """
    primal, names = module.primal, projections(module)
    if "value" not in names:
        raise ValueError("q, k and v do not come from linear layers of their own")
    like: Any = {"device": primal.We.device, "dtype": primal.We.dtype}
    width = getattr(module, names["value"]).in_features
    states = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0)).to(**like)
    try:
        seen, scaling, output = observed(module, states)
    except Exception as error:  # whatever a module raises that wants more than hidden states
        raise ValueError("its attention wants more than hidden states, such as rotary positions") from error
    roles = plain_roles(module, names, states, seen)
    if not roles:
        raise ValueError("no projection is a plain linear layer that it reads as it is")
    heads, dim, own = len(primal.We), seen[0].shape[-1], primal.state_dict()
    factor = dim**-0.5 if scaling is None else scaling
    new = PrimalAttention(heads, dim, primal.settings, folded=tuple(roles)).to(**like).train(primal.training)
    new.alone = primal.alone
    new.load_state_dict({name: own[name].clone() for name in new.state_dict()})
    module.primal = new
    for role, x in zip(NAMES, seen, strict=True):
        if role not in roles:
            continue
        if role == "value":
            maps, shift = primal.value_map.double().mT, None
        elif role == "query":
            maps, shift = factor * primal.key_landmarks.double(), None
        else:
            maps, shift = primal.query_landmarks.double(), primal.shift.double().mT
        setattr(module, names[role], multiplied(getattr(module, names[role]), maps, shift, x.shape[1]))
    try:
        change = observed(module, states)[2] - output
        close = bool(change.abs().max() <= 0.02 * output.abs().max())
    except Exception:  # likewise, of shapes
        close = False
    if not close:
        raise ValueError("its attention does not take projections of other shapes")
    return {role: names[role] for role in roles}


def fold(model: Any) -> None:
    """Fold every replaced layer of a model in place, all or none.

    Raises:
        ValueError: the model has no replaced layers, is folded already, or cannot be.
    """
    if not model.config.primal_layers or model.config.primal_folded:
        state = "is folded already" if model.config.primal_folded else "has no replaced layers"
        raise ValueError(f"{type(model).__name__} {state}; fold a converted model once")
    modules = [module for module in model.modules() if isinstance(getattr(module, "primal", None), PrimalAttention)]
    before, training = [dict(module.named_children()) for module in modules], model.training
    model.eval()  # dropout would tell a module and its fold apart
    try:
        found = [fold_module(module) for module in modules]
        if any(one != found[0] for one in found):
            raise ValueError("its layers differ in what can be folded")
    except ValueError as error:
        for module, children in zip(modules, before, strict=True):
            for name, child in children.items():
                setattr(module, name, child)
        raise ValueError(f"{type(model).__name__} cannot be folded: {error}; use it as it is") from error
    finally:
        model.train(training)
    model.config.primal_folded = found[0]
