"""A toy vision-language model with the parts that sharding must handle, and data for it.

It has a tower with blocks and a merger, a decoder, norms, a head tied to the embedding (or not), a frequency
buffer that no checkpoint holds, and where asked for dropout and a parameter of one number, which leaves all
ranks but one with an empty shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lmms_engine.config import Job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.models.spec import Layout
from lmms_engine.objectives.base import Objective
from lmms_engine.parallel.fsdp import materialise
from lmms_engine.parallel.mesh import Mesh, build_mesh, leave_mesh
from lmms_engine.segments import RowRef, Segments
from lmms_engine.train.parallelize import parallelize

VOCAB, DIM, PIXELS, PICTURE = 23, 12, 6, 0   # PICTURE: the placeholder's token id

LAYOUT = Layout(
    body="model",
    decoder="model.language_model",
    blocks=("model.language_model.layers.*", "model.visual.blocks.*"),
    encoders=("model.visual",),
    head="lm_head",
    norm="model.language_model.norm",
    embed="model.language_model.embed_tokens",
)


class ToyBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM + 1)   # an odd width: shards of unequal size
        self.down = nn.Linear(2 * DIM + 1, DIM, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.calls += 1
        return x + self.dropout(self.down(F.silu(self.up(self.norm(x) * scale))))


class ToyVisionBlock(ToyBlock):
    pass


class ToyTower(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(PIXELS, DIM)
        self.pos_embed = nn.Parameter(torch.randn(4, DIM))
        self.blocks = nn.ModuleList(ToyVisionBlock(dropout) for _ in range(2))
        self.merger = nn.Linear(DIM, DIM)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed(pixels) + self.pos_embed[torch.arange(len(pixels)) % 4]
        for block in self.blocks:
            x = block(x, scale=torch.ones(DIM))
        return self.merger(x)


class ToyDecoder(nn.Module):
    def __init__(self, dropout: float, gain: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(ToyBlock(dropout) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.gain = nn.Parameter(torch.ones(1)) if gain else None
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(DIM) / DIM), persistent=False)

    def forward(self, embeds: Tensor) -> Tensor:
        # every token sees the mean of those before it, or else pictures would not reach the loss
        embeds = embeds + embeds.cumsum(0) / torch.arange(1, len(embeds) + 1)[:, None]
        for layer in self.layers:
            embeds = layer(embeds, scale=self.inv_freq)
        return self.norm(embeds) if self.gain is None else self.norm(embeds) * self.gain


class ToyBody(nn.Module):
    def __init__(self, dropout: float, gain: bool) -> None:
        super().__init__()
        self.visual = ToyTower(dropout)
        self.language_model = ToyDecoder(dropout, gain)

    def forward(self, ids: Tensor, pixels: Tensor | None) -> Tensor:
        embeds = self.language_model.embed_tokens(ids)
        if pixels is not None:   # without a stand-in the tower is not called, as in library models
            embeds = embeds.masked_scatter((ids == PICTURE)[:, None], self.visual(pixels))
        return self.language_model(embeds)


class ToyModel(nn.Module):
    def __init__(self, *, tied: bool = True, dropout: float = 0.0, gain: bool = False) -> None:
        super().__init__()
        self.model = ToyBody(dropout, gain)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.model.language_model.embed_tokens.weight


class ToyObjective(Objective):
    """Sum of weighted cross-entropies, all logits at once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.coefficients = {"ce": 1.0}

    def weights(self, batch: PackedBatch) -> dict[str, float]:
        return {"ce": float(batch.loss_weights.sum(dtype=torch.float64))}

    def forward(self, batch: PackedBatch) -> dict[str, Tensor]:
        hidden = self.model.model(batch.input_ids, batch.media.get("pixel_values"))
        loss = F.cross_entropy(self.model.lm_head(hidden), batch.labels, ignore_index=-100, reduction="none")
        return {"ce": (loss * batch.loss_weights).sum()}


@contextmanager
def single_mesh() -> Iterator[Mesh]:
    """The mesh of this one process, for its duration."""
    mesh = build_mesh()
    try:
        yield mesh
    finally:
        leave_mesh()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's whole gradient; call it on all ranks."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole; call it on all ranks."""
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], rtol: float = 1e-5) -> None:
    """Per tensor max|difference| <= rtol * max|gradient|; tiny tensors against the global norm."""
    assert ours.keys() == theirs.keys()
    norm = float(sum(g.double().square().sum() for g in theirs.values()) ** 0.5)
    assert norm > 0
    for name, want in theirs.items():
        largest = float(want.abs().max())
        bound = rtol * largest if largest >= 1e-7 * norm else 1e-7 * norm
        worst = float((ours[name] - want).abs().max())
        assert worst <= bound, f"{name}: {worst:.3g} > {bound:.3g}"


def build(mesh: Mesh, job: Job, *, seed: int = 0, fill: bool = True, **kinds: bool | float) -> ToyObjective:
    """The objective, sharded and filled by the engine's own path. fill=False: its weights stay undefined."""
    with torch.device("meta"):
        model = ToyModel(**kinds)
    objective = ToyObjective(model)
    parallelize(objective, LAYOUT, mesh, job.trainer)
    weights = (lambda: reference_weights(seed, **kinds)) if fill else None
    buffers = dict(reference(seed, **kinds).named_buffers())
    offload = job.trainer.fsdp_config.cpu_offload
    materialise(objective, model, mesh, weights, lambda: buffers, offload=offload)
    return objective


def reference(seed: int = 0, **kinds: bool | float) -> ToyModel:
    """The same model in one piece, never sharded."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ToyModel(**kinds)


def reference_weights(seed: int = 0, **kinds: bool | float) -> Iterator[tuple[str, Tensor]]:
    """Its parameters, as a stream."""
    for name, parameter in reference(seed, **kinds).named_parameters():
        yield name, parameter.detach()


def job(**trainer: object) -> Job:
    """A job with the given trainer_args; recomputation is off unless asked for."""
    fsdp = {"activation_checkpointing": False, **trainer.pop("fsdp_config", {})}
    given = {"learning_rate": 0.01, "lr_scheduler_type": "constant", "warmup_ratio": 0.0, "report_to": "none"}
    return Job.from_dict(
        {
            "model_config": {"load_from_config": {"model_type": "qwen3_vl"}},
            "dataset_config": {"datasets": [{"path": "unused.jsonl"}]},
            "trainer_args": {**given, **trainer, "fsdp_config": fsdp},
        }
    )


def batch(lengths: list[int], *, pictures: int, seed: int, supervised: float = 0.5) -> PackedBatch:
    """A pack of random rows. pictures: patches in the first row; 0 gives a stand-in of one, weight 0."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (sum(lengths),), generator=rng)
    weights = (torch.rand(len(ids), generator=rng) < supervised).float()
    ids[:pictures] = PICTURE
    weights[:pictures] = 0
    rows = tuple(RowRef("toy", 0, i, f"{seed}-{i}") for i in range(len(lengths)))
    if not pictures:
        ids, weights = torch.cat([ids, torch.tensor([PICTURE])]), F.pad(weights, (0, 1))
        lengths = [*lengths, 1]
    labels = torch.randint(0, VOCAB, (len(ids),), generator=rng)
    return PackedBatch(
        segments=Segments.from_lengths(lengths),
        input_ids=ids,
        position_ids=None,
        labels=labels.masked_fill(weights == 0, -100),
        loss_weights=weights,
        media={"pixel_values": torch.randn(pictures or 1, PIXELS, generator=rng)},
        rows=rows,
    )
