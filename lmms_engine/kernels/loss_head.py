"""LossHead: output projection and cross-entropy in one, without the [T, V] logits.

Only supervised positions are computed. On a GPU Liger's fused kernel does it; elsewhere a loop over chunks
whose gradients are made in the forward. Both give a float32 sum; nothing is averaged here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmms_engine.errors import UserError

CHUNK_LOGITS = 1 << 24   # logits alive at once in the chunked version: 64 MiB of float32
FUSED_ROWS = 4096   # positions at a time in the fused version, about: 1.2 GB of bf16 logits over 152k words


class LossHead(nn.Linear):
    """A drop-in for a model's `lm_head` that shares its parameters and names, and returns a loss sum.

    fused: Liger's kernel (GPU only) instead of the chunked loop.
    """

    def __init__(self, head: nn.Linear, *, fused: bool) -> None:
        super().__init__(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        self.weight, self.bias = head.weight, head.bias   # the same objects: ties survive
        self.fused = fused

    def forward(
        self,
        hidden: Tensor,                    # [T, dim]
        labels: Tensor,                    # int64 [T]
        weights: Tensor,                   # float32 [T]
        supervised: Tensor | None = None,  # int64 [S]: where weights > 0, from the host
        uniform: bool | None = None,       # all those weights are 1, known on the host
        groups: Tensor | None = None,      # int64 [T]: the group of each position, negative for none
        num_groups: int = 0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Sum of weights * cross-entropy over the supervised positions, float32 scalar; 0 if there are none.

        With `groups` also each group's own sum, [num_groups] in float64 and without gradient. Leaving
        `supervised` and `uniform` out costs a device sync each.
        """
        if supervised is None:
            supervised = (weights > 0).nonzero().flatten()
        hidden, labels, weights = hidden[supervised], labels[supervised], weights[supervised]
        if not len(supervised):
            # An empty product: exactly 0, and gradients of exactly 0 where other ranks have real ones.
            loss, losses = F.linear(hidden, self.weight, self.bias).float().sum(), weights
        elif self.fused:
            if uniform is None:
                uniform = bool((weights == 1).all())
            by_row = groups is not None or not uniform
            loss, losses = _fused(hidden, self.weight, self.bias, labels, weights if by_row else None)
        else:
            parts = (hidden, self.weight, self.bias)
            if not torch.is_grad_enabled():   # a Function hears what could have gradients, not what is wanted
                parts = tuple(None if part is None else part.detach() for part in parts)
            loss, losses = _ChunkedLoss.apply(*parts, labels, weights)
        if groups is None:
            return loss
        return loss, _group_sums(losses, groups[supervised], num_groups)

    def logits(self, hidden: Tensor) -> Tensor:
        """The plain projection, for tests and tools: [..., dim] to [..., V]."""
        return F.linear(hidden, self.weight, self.bias)


def replace_head(model: nn.Module, path: str, *, fused: bool) -> LossHead:
    """Puts a LossHead in the place of the `nn.Linear` at `path`; returns it."""
    head = model.get_submodule(path)
    if not isinstance(head, nn.Linear):
        raise UserError(f"head '{path}' is a {type(head).__name__}; LossHead replaces nn.Linear only")
    loss_head = LossHead(head, fused=fused)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, loss_head)
    return loss_head


class _ChunkedLoss(torch.autograd.Function):
    """Linear and weighted cross-entropy, a chunk of positions at a time.

    The gradient is made beside the loss while a chunk's logits are there, and scaled in backward: three
    matrix products altogether, where recomputing the logits would take four.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, weights):
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        chunk = max(1, CHUNK_LOGITS // weight.shape[0])
        exact = torch.promote_types(weight.dtype, torch.float32)
        losses = torch.empty(hidden.shape[0], dtype=torch.float64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=exact) if need_bias else None
        for rows in torch.arange(hidden.shape[0], device=hidden.device).split(chunk):
            h, target, factor = hidden[rows], labels[rows], weights[rows].to(exact)
            logits = F.linear(h, weight, bias).to(exact)
            log_z = logits.logsumexp(-1)
            loss = log_z - logits.gather(1, target[:, None])[:, 0]
            losses[rows] = (loss * factor).double()
            if not (need_hidden or need_weight or need_bias):
                continue
            grad = (logits - log_z[:, None]).exp_()
            grad.scatter_add_(1, target[:, None], -torch.ones_like(grad[:, :1]))
            grad = (grad * factor[:, None]).to(weight.dtype)
            if need_hidden:
                grad_hidden[rows] = grad @ weight
            if need_weight:
                grad_weight += grad.T @ h
            if need_bias:
                grad_bias += grad.sum(0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        return losses.sum().to(exact), losses

    @staticmethod
    def backward(ctx, grad_total, _):
        grads = ctx.saved_tensors
        dtypes = (ctx.weight_dtype,) * 3
        scaled = (None if g is None else (g * grad_total).to(d) for g, d in zip(grads, dtypes, strict=True))
        return *scaled, None, None


def _fused(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Liger's fused linear cross-entropy; gradients of the weight add up in float32.

    Returns the sum and, where weights are given, the weighted losses [S], without gradient.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    # By default Liger takes so few rows at a time that reading and writing the weight's float32 gradient for
    # each chunk costs more than the product does. Its budget is in multiples of rows * dim.
    (rows, dim), vocab = hidden.shape, weight.shape[0]
    loss = liger_fused_linear_cross_entropy(
        hidden, weight, labels, bias,
        reduction="sum" if weights is None else "none",
        accum_dtype=torch.float32,
        chunk_mem_const=max(1, round(FUSED_ROWS * vocab / (rows * dim))),
    )  # fmt: skip
    if weights is None:
        return loss.float(), None
    losses = loss.float() * weights
    return losses.sum(), losses.detach()


def _group_sums(losses: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Sum of the losses of each group, float64 [num_groups]. The same bits each time, as atomics are not."""
    member = groups == torch.arange(num_groups, device=groups.device)[:, None]
    return torch.where(member, losses.double(), 0.0).sum(1)
