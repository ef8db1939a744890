"""What a batch costs in each stage of `finetune.py`.

Letters: B batch, N tokens, C classes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from finetune_config import FineTuneConfig
from finetune_parts import comparable
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hf_primal.modeling.modeling_primal import self_attention_modules

Parts = dict[str, Tensor]


def mean_pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """Sentence embeddings (B, d): the mean of (B, N, d) over the tokens of a (B, N) mask."""
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def similarity(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Cosine (B,) of the two halves of a batch."""
    one, two = mean_pooled(output.last_hidden_state, batch["attention_mask"]).chunk(2)
    return F.cosine_similarity(one, two)


def relative_error(found: Tensor, wanted: Tensor, mask: Tensor | None) -> Tensor:
    """Squared error over tokens relative to the power of what was wanted, a scalar."""
    if mask is not None and found.ndim == 3 and found.shape[:2] == mask.shape:
        found, wanted = (tensor[mask.bool()] for tensor in (found, wanted))
    return (found - wanted).float().square().sum() / wanted.float().square().sum().clamp(min=1e-12)


def soft_targets(logits: Tensor, teacher: Tensor, labels: Tensor | None, temperature: float) -> Tensor:
    """KL divergence of the softmax at a temperature, times its square, the mean over rows (with a label, if (B, N))."""
    if logits.ndim == 3 and labels is not None and labels.shape == logits.shape[:2]:
        logits, teacher = logits[labels != -100], teacher[labels != -100]
    own, aim = ((x.float() / temperature).log_softmax(-1).flatten(0, -2) for x in (logits, teacher))
    return F.kl_div(own, aim, reduction="batchmean", log_target=True) * temperature**2


@contextmanager
def attention_outputs(model: Any) -> Iterator[dict[int, Tensor]]:
    """Outputs of the self-attention modules in the next forwards, by layer."""
    seen: dict[int, Tensor] = {}

    def keep(index: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            seen[index] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [module.register_forward_hook(keep(i)) for i, (_, module) in enumerate(self_attention_modules(model))]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def match_loss(model: Any, plain: Any, teacher: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Parts]:
    """Mean over replaced layers of the relative error of the attention's output."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad(), attention_outputs(teacher) as wanted:
        teacher(**inputs)
    with attention_outputs(plain) as found:
        output = model(**inputs)
    mask = batch.get("attention_mask")
    replaced = plain.config.primal_layers
    loss = torch.stack([relative_error(found[index], wanted[index], mask) for index in replaced]).mean()
    if isinstance(plain, FSDPModule):  # the backward of what it returned is where it gathers its parameters
        loss = loss + 0 * output[0].sum()
    return loss, {"loss_match": loss.detach()}


def distill_loss(model: Any, teacher: Any, batch: dict[str, Tensor], temperature: float) -> tuple[Tensor, Parts]:
    """Mean relative error of the hidden states, plus the divergence of the logits where both have the same."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        aim = teacher(**inputs, output_hidden_states=True)
    output = model(**inputs, output_hidden_states=True)
    mask = batch.get("attention_mask")
    pairs = list(zip(output.hidden_states, aim.hidden_states, strict=True))[1:]
    hidden = torch.stack([relative_error(one, two, mask) for one, two in pairs]).mean()
    parts = {"loss_hidden": hidden.detach()}
    if not comparable(output, aim):
        return hidden, parts
    kl = soft_targets(output.logits, aim.logits, batch.get("labels"), temperature)
    return hidden + kl, parts | {"loss_logits": kl.detach()}


def task_loss(
    model: Any, plain: Any, teacher: Any, batch: dict[str, Tensor], config: FineTuneConfig
) -> tuple[Tensor, Parts]:
    """The model's own loss with its KSVD part, and the teacher's logits beside it if there is a teacher."""
    primal = getattr(plain.config, "primal_layers", None)
    if config.task == "sentence-similarity":
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        task = F.mse_loss(similarity(output, batch), batch["labels"].float())
        ksvd = plain.last_losses.get("loss_ksvd") if primal else None
        loss = task if ksvd is None else task + ksvd
        parts = {"loss_task": task.detach()} | ({} if ksvd is None else {"loss_ksvd": ksvd.detach()})
    else:
        output = model(**batch)
        loss = output.loss
        parts = dict(plain.last_losses) if primal else {"loss_task": loss.detach()}
    if teacher is not None:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        with torch.no_grad():
            aim = teacher(**inputs)
        if comparable(output, aim):
            kl = soft_targets(output.logits, aim.logits, batch.get("labels"), config.temperature)
            loss, parts = loss + config.distill_weight * kl, parts | {"loss_logits": kl.detach()}
    return loss, parts
