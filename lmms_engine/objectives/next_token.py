"""Next-token cross-entropy over packed sequences, with a padded reference path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.objectives import OBJECTIVES
from lmms_engine.objectives.base import SOURCE_TERM, Objective
from lmms_engine.objectives.routing import TERMS, router_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PretrainedConfig

    from lmms_engine.models.spec import ModelSpec


@OBJECTIVES.register("next_token")
class NextToken(Objective):
    """Sum over supervised positions of weight * cross-entropy, term `ce`.

    sources: names of the sources whose part of it is wanted too, each as the metric `source/<name>`.

    rmpad: True runs the flat sequence through our attention (the model must `use` it); False unfolds the pack
    to one padded row per segment and leaves attention and its mask to the library: an independent reference.

    A model with experts has the terms of routing.py too. The load balance counts in the loss by the config's
    `router_aux_loss_coef` where `output_router_logits` is true, as in the library; z by `router_z_loss_coef`.
    """

    shares_sequences = True

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        config: PretrainedConfig,
        *,
        rmpad: bool = True,
        sources: Sequence[str] = (),
        router_z_loss_coef: float = 0.0,
    ) -> None:
        super().__init__()
        self.model = model
        self._source_terms = [SOURCE_TERM + name for name in sources]
        self._sources = tuple(sources)
        self.coefficients = {"ce": 1.0} | dict.fromkeys(self._source_terms, 0.0)
        self._routes = spec.layout.experts is not None
        if self._routes:
            text = config.get_text_config()
            self._top_k = text.num_experts_per_tok
            aux = text.router_aux_loss_coef if text.output_router_logits else 0.0
            self.coefficients |= dict(zip(TERMS, (aux, router_z_loss_coef, 0.0), strict=True))
        self.rmpad = rmpad
        self._config = config
        self._extra_kwargs = spec.extra_kwargs
        self._body, self._head = spec.layout.body, spec.layout.head

    def draw(self, batch: PackedBatch, rng: torch.Generator) -> PackedBatch:
        """Nothing is random here; marks whose each position is, where sources are told apart."""
        return batch.with_groups(self._sources) if self._sources else batch

    def weights(self, batch: PackedBatch) -> dict[str, float]:
        """`ce`: the sum of the loss weights, from a batch on the host; of a source, that of its positions.

        Routers count every token of a row, supervised or not.
        """
        weights = batch.loss_weights.double()
        own = (weights[batch.groups == i].sum() for i in range(len(self._sources)))
        sums = dict(zip(self._source_terms, own, strict=True))
        routing = dict.fromkeys(TERMS, batch.num_tokens) if self._routes else {}
        return {term: float(total) for term, total in {"ce": weights.sum(), **sums, **routing}.items()}

    def forward(self, batch: PackedBatch) -> dict[str, Tensor]:
        """The sum over this batch. Weights that are not on the device yet cost a sync each."""
        listed = batch.supervised is not None
        head = self.model.get_submodule(self._head)
        hidden, router_logits = self._run(batch)
        loss = head(
            hidden,
            batch.labels,
            batch.loss_weights,
            supervised=batch.supervised,
            uniform=batch.uniform_weights if listed else None,
            groups=batch.groups,
            num_groups=len(self._sources),
        )
        terms = self._routing(batch, router_logits) if self._routes else {}
        if not self._sources:
            return {"ce": loss, **terms}
        total, by_source = loss
        return {"ce": total, **dict(zip(self._source_terms, by_source, strict=True)), **terms}

    def _routing(self, batch: PackedBatch, router_logits: Sequence[Tensor]) -> dict[str, Tensor]:
        """The terms of routing.py; no graph where they are metrics alone."""
        group = self.sequence_group
        part = (0, 1) if group is None else (group.rank(), group.size())
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and any(self.coefficients[term] for term in TERMS)
        ):
            return router_sums(
                router_logits, batch.segments, len(batch.rows), top_k=self._top_k, part=part, group=group
            )

    def hidden(self, batch: PackedBatch) -> Tensor:
        """The body's last hidden states on the flat sequence, [T, dim], whichever path computes them."""
        return self._run(batch)[0]

    def _run(self, batch: PackedBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The hidden states, and the logits of every router, [T, E] each."""
        body = self.model.get_submodule(self._body)
        flat = {"input_ids": batch.input_ids, **self._extra_kwargs(batch, self._config)}
        ids, positions = flat.pop("input_ids"), batch.position_ids
        if self._routes:
            flat["output_router_logits"] = True
        if self.rmpad:
            out = body(
                input_ids=ids[None],
                position_ids=positions.unsqueeze(-2),   # [1, T] or [3, 1, T]
                segments=batch.segments,
                use_cache=False,
                **flat,
            )
            return out.last_hidden_state[0], out.router_logits if self._routes else ()
        unfold, mask_BL, refold = padded_index(batch)
        out = body(
            input_ids=ids[unfold].masked_fill(mask_BL == 0, 0),   # the mask hides them, whatever the id
            position_ids=positions[..., unfold],
            attention_mask=mask_BL,
            use_cache=False,
            **flat,
        )
        router_logits = tuple(layer[refold] for layer in out.router_logits) if self._routes else ()
        return out.last_hidden_state.flatten(0, 1)[refold], router_logits


def padded_index(batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """How a flat sequence becomes rows of max_len and back.

    Returns the flat position of every cell [B, L] (pads repeat a row's last one), the mask of real cells
    int64 [B, L], and the cell of every flat position [T].
    """
    segments = batch.segments
    starts = segments.cu_seqlens[:-1].long()
    lengths = segments.cu_seqlens.diff().long()
    columns = torch.arange(segments.max_len, device=starts.device)
    mask_BL = (columns[None] < lengths[:, None]).long()
    unfold = starts[:, None] + columns[None].minimum(lengths[:, None] - 1)
    tokens = batch.input_ids.numel()
    row = torch.arange(segments.num_segments, device=starts.device).repeat_interleave(
        lengths, output_size=tokens
    )
    refold = row * segments.max_len + torch.arange(tokens, device=starts.device) - starts[row]
    return unfold, mask_BL, refold
