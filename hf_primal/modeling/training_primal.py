"""The KSVD loss in training: in the model's own loss, its parts in Trainer's log, and beside label smoothing.

Letters: B batch, N tokens, C classes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

logger = transformers.logging.get_logger(__name__)
PARTS = ("loss_task", "loss_ksvd")


def add_ksvd_loss(model: Any, output: Any, squares: list[Tensor]) -> Any:
    """Add ksvd_weight * mean over layers of J^2 (equation 10) to the loss of a training forward.

    Args:
        model: what ran; its `last_losses` get the parts.
        output: what it returned, a ModelOutput or a tuple that begins with the loss, if there is one.
        squares: J^2 of every replaced layer, scalars; none when the loss is switched off.

    Returns:
        The output, with the sum for its loss.
    """
    task = output_loss(output)
    model.last_losses = {} if task is None else {"loss_task": task.detach()}
    if not squares:
        return output
    ksvd = model.config.ksvd_weight * torch.stack([square.to(squares[-1].device) for square in squares]).mean()
    if task is None:
        if model.expects_labels and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            logger.warning_once(
                f"{type(model).__name__} got no labels while training, so the KSVD loss is in no loss: add "
                'model.last_losses["loss_ksvd"] to yours, or use Trainer(compute_loss_func=model.smoothed_loss(0.1))'
            )
        model.last_losses["loss_ksvd"] = ksvd
        return seen_by_ddp(output, ksvd)
    model.last_losses["loss_ksvd"] = ksvd.detach()
    total = task + ksvd.to(task.device)
    if isinstance(output, tuple):
        return (total, *output[1:])
    output.loss = total
    return output


def output_loss(output: Any) -> Tensor | None:
    """The loss that a model returned; in a tuple it is a scalar in the first place."""
    if not isinstance(output, tuple):
        return getattr(output, "loss", None)
    return output[0] if output and isinstance(output[0], Tensor) and output[0].ndim == 0 else None


class Beside(torch.autograd.Function):
    """The first tensor as it is; the second gets a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, shown: Tensor, hidden: Tensor) -> Tensor:
        """See the class."""
        ctx.save_for_backward(hidden)
        return shown.view_as(shown)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        return gradient, torch.zeros_like(ctx.saved_tensors[0])


def seen_by_ddp(output: Any, ksvd: Tensor) -> Any:
    """The output, from which DistributedDataParallel finds the parameters that a KSVD loss outside of it depends on."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and ksvd.requires_grad):
        return output
    if isinstance(output, tuple):
        return (Beside.apply(output[0], ksvd), *output[1:])
    first = next(iter(output))
    output[first] = Beside.apply(output[first], ksvd)
    return output


def smoothed_loss(model: Any, smoothing: float) -> Callable[..., Tensor]:
    """Cross-entropy with label smoothing plus the KSVD loss; see `PrimalMixin.smoothed_loss`.

    Trainer takes the labels from the model for it, and hands over how many there are in all accumulated batches (of
    all processes). Each batch adds its share of both parts, so that accumulation changes nothing.
    """
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing must be 0..1, got {smoothing}")
    model.expects_labels = False
    shifted = type(model).__name__.removeprefix("Primal") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Logits (B, C) or (B, N, C) and integer labels (B,) or (B, N), -100 where there is none; a scalar."""
        if labels is None or labels.is_floating_point():
            raise ValueError("smoothed_loss needs integer class labels")
        logits = outputs[0] if isinstance(outputs, tuple) else outputs["logits"]
        if shifted:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        count = labels.ne(-100).sum()
        items = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        task = F.cross_entropy(logits, labels.flatten(), label_smoothing=smoothing, reduction="sum") / items
        ksvd = torch.zeros_like(task)
        if model.training and model.config.ksvd_weight > 0 and model.config.primal_layers:
            if "loss_ksvd" not in model.last_losses:
                raise ValueError("smoothed_loss found no KSVD loss (DataParallel?); start one process per device")
            ksvd = model.last_losses["loss_ksvd"].to(task.device) * (count / items)
        if model.training:
            shares = {"loss_task": task.detach(), "loss_ksvd": ksvd.detach()}
            model.last_losses = {**shares, "items": torch.as_tensor(items)}
        return task + ksvd

    return loss


class KsvdCallback(TrainerCallback):
    """Writes `loss_task` and `loss_ksvd` beside `loss` into Trainer's log: means since the last log, as `loss` is.

    Integrations that Trainer makes from `report_to` run before the callbacks one gives. For the parts in TensorBoard,
    say, use `report_to="none"` and `callbacks=[model.ksvd_callback(), TensorBoardCallback()]`.

    There are no parts to log under torch.nn.DataParallel, which Trainer takes for several devices in one process.

    Args:
        model: the model in training, without what wraps it.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.clear()

    def clear(self) -> None:
        """Forget everything since the last log."""
        self.step: dict[str, list[Tensor]] = {name: [] for name in PARTS}  # of the batches of one step
        self.sums: dict[str, Tensor] = {}  # over steps
        self.steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start afresh.

        Raises:
            ValueError: `label_smoothing_factor`, which takes the labels from the model, so that it has no loss.
        """
        if args.label_smoothing_factor > 0 and self.model.config.ksvd_weight > 0:
            raise ValueError(
                f"label_smoothing_factor {args.label_smoothing_factor} leaves no KSVD loss; drop it and use "
                f"Trainer(compute_loss_func=model.smoothed_loss({args.label_smoothing_factor}))"
            )
        self.clear()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the parts of one accumulated batch; nothing waits for the device."""
        for name in PARTS:
            if name in self.model.last_losses:
                self.step[name].append(self.model.last_losses[name].detach().float())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the batches of a step together as Trainer does: their mean, or their sum where each is a share."""
        self.on_substep_end(args, state, control)
        shares = "items" in self.model.last_losses
        scale = args.world_size if shares and args.average_tokens_across_devices else 1
        for name, values in self.step.items():
            if values:
                stacked = torch.stack(values)
                value = stacked.sum() * scale if shares else stacked.mean()
                self.sums[name] = self.sums.get(name, 0.0) + value
            values.clear()
        self.steps += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Write the means over steps, and over processes, into the log and Trainer's history."""
        if not logs or "loss" not in logs or not self.sums:
            return
        means = torch.stack([value.to(args.device) for value in self.sums.values()]) / self.steps
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(means)
            means = means / torch.distributed.get_world_size()
        found = dict(zip(self.sums, means.tolist(), strict=True))
        logs.update(found)
        state.log_history[-1].update(found)
        self.clear()
