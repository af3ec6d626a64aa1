"""The table of cases: how each changes the job, how many ranks it takes, and how the rows are dealt out.

Every case sees the same rows with the same weights; only the way to the numbers differs. So a new layout,
backend or kernel is one more line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmms_engine.config import Job
from lmms_engine.errors import UserError
from lmms_engine.registry import nearest

MICROS = 4   # packs of a global batch, at least: one for each rank of the largest case

# What all cases start from, whatever the recipe says: one process, float32, no kernel, nothing recomputed.
PLAIN: dict[str, Any] = {
    "trainer_type": "fsdp2_trainer",
    "trainer_args.fsdp2": True,
    "trainer_args.deepspeed": None,
    "trainer_args.bf16": False,
    "trainer_args.use_rmpad": True,
    "trainer_args.use_liger_kernel": False,
    "trainer_args.sp_ulysses_degree": 1,
    "trainer_args.ep_degree": 1,
    "trainer_args.fsdp_config.hsdp_shard_size": 0,
    "trainer_args.fsdp_config.reshard_after_forward": True,
    "trainer_args.fsdp_config.cpu_offload": False,
    "trainer_args.fsdp_config.activation_checkpointing": False,
    "trainer_args.dataloader_num_workers": 0,
    "trainer_args.num_train_epochs": None,
    "trainer_args.eval_steps": None,
    "trainer_args.log_rows": False,
    "trainer_args.report_to": [],
    "dataset_config.eval_datasets": [],
    "model_config.attn_implementation": "sdpa",
}


@dataclass(frozen=True)
class Case:
    """One way to the numbers. deal: a name in deal.py. changes: dotted keys of the job and their values."""

    name: str
    says: str
    ranks: int = 1
    deal: str = "packs"
    changes: Mapping[str, Any] = field(default_factory=dict)
    needs_gpu: bool = False
    resumes: bool = False   # compares a resumed run with one that was not interrupted

    @property
    def bf16(self) -> bool:
        """Whether it computes in bfloat16 and so needs the wider tolerance."""
        return bool(self.changes.get("trainer_args.bf16"))


def _sharing(sp: int = 1, ep: int = 1, copy: int = 0) -> dict[str, Any]:
    return {
        "trainer_args.sp_ulysses_degree": sp,
        "trainer_args.ep_degree": ep,
        "trainer_args.fsdp_config.hsdp_shard_size": copy,
    }


def _zero(stage: int) -> dict[str, Any]:
    return {
        "trainer_type": "deepspeed_trainer",
        "trainer_args.fsdp2": False,
        "trainer_args.deepspeed": {"zero_optimization": {"stage": stage}},
    }


def _attention(backend: str) -> dict[str, Any]:
    return {
        "model_config.attn_implementation": backend,
        "trainer_args.bf16": "flash" in backend or backend == "varlen",   # these know half precision only
    }


# Steps that move the weights far enough for lost moments to show.
BRISK: dict[str, Any] = {
    "trainer_args.learning_rate": 1e-3,
    "trainer_args.lr_scheduler_type": "constant",
    "trainer_args.lr_scheduler_kwargs": {},
    "trainer_args.warmup_ratio": 0.0,
    "trainer_args.warmup_steps": 0,
    "trainer_args.save_steps": 1,
    "trainer_args.save_total_limit": 1000,
}

REFERENCE = Case(
    "reference",
    "one process, each row alone, attention and mask of the library, no kernel, no recomputation, float32",
    deal="rows",
    changes={"trainer_args.use_rmpad": False},
)
UNPADDED_REFERENCE = Case(   # of families that have no padded path
    "reference",
    "one process, each row alone, no kernel, no recomputation, float32",
    deal="rows",
)

CASES: tuple[Case, ...] = (
    Case("packed", "packs as training sees them, one process; one micro-batch a pack"),
    Case("rows", "each row a micro-batch of its own", deal="rows"),
    Case("padded", "packs through the padded path", changes={"trainer_args.use_rmpad": False}),
    Case("joined", "all packs of a step in one micro-batch: no accumulation", deal="joined"),
    Case(
        "recompute",
        "all blocks recomputed",
        changes={"trainer_args.fsdp_config.activation_checkpointing": True},
    ),
    Case(
        "selective",
        "all blocks recomputed, but for their products",
        changes={"trainer_args.fsdp_config.activation_checkpointing": "selective"},
    ),
    Case("attention-flex", "flex attention", changes=_attention("flex")),
    Case("attention-varlen", "torch's varlen attention, bf16", changes=_attention("varlen")),
    Case("attention-flash", "flash-attn, bf16", changes=_attention("flash_attn")),
    Case("attention-flash-4", "flash-attn-4, bf16", changes=_attention("flash_attn_4")),
    Case("kernels", "fused kernels", changes={"trainer_args.use_liger_kernel": True}, needs_gpu=True),
    Case("fsdp-2", "FSDP2 over two ranks", 2),
    Case(
        "offload",
        "FSDP2 over two ranks, weights and optimiser on the host",
        2,
        changes={"trainer_args.fsdp_config.cpu_offload": True},
    ),
    Case("uneven", "two ranks, one of which has one pack and then nothing", 2, "uneven"),
    Case("modalities", "two ranks, one with all the pictures, one with none", 2, "modalities"),
    Case("sp-2", "two ranks share each sequence", 2, changes=_sharing(sp=2)),
    Case("ep-2", "two ranks share the experts", 2, changes=_sharing(ep=2)),
    Case("ep-2-sp-2", "two ranks share sequences and experts", 2, changes=_sharing(sp=2, ep=2)),
    Case("resumed", "a run stopped after a step and resumed, two ranks", 2, changes=BRISK, resumes=True),
    Case("zero-2", "DeepSpeed ZeRO-2 over two ranks", 2, changes=_zero(2)),
    Case("zero-3", "DeepSpeed ZeRO-3 over two ranks", 2, changes=_zero(3)),
    Case("fsdp-4", "FSDP2 over four ranks", 4),
    Case("hsdp-2x2", "two copies of the parameters, two ranks each", 4, changes=_sharing(copy=2)),
    Case("sp-4", "four ranks share each sequence", 4, changes=_sharing(sp=4)),
    Case("sp-2-hsdp", "two copies; two ranks share each sequence", 4, changes=_sharing(sp=2, copy=2)),
    Case("ep-2-hsdp", "two copies; two ranks share the experts", 4, changes=_sharing(ep=2, copy=2)),
    Case("ep-4", "four ranks share the experts", 4, changes=_sharing(ep=4)),
)


def choose(only: Iterable[str]) -> list[Case]:
    """The cases of these names, in the table's order; none given: all. Unknown names raise UserError."""
    wanted, names = list(only), [case.name for case in CASES]
    for name in wanted:
        if name not in names:
            raise UserError(f"--only {name}: no such case (legal: {', '.join(names)}){nearest(name, names)}")
    return [case for case in CASES if not wanted or case.name in wanted]


def plain_job(job: Job, steps: int) -> Job:
    """The user's job reduced to what all cases share."""
    given = job.trainer
    own = {
        "trainer_args.max_steps": max(steps, 2) + 1,   # of the resumed run
        "trainer_args.gradient_accumulation_steps": max(MICROS, given.gradient_accumulation_steps),
    }
    return changed(job, {**PLAIN, **own})


def changed(job: Job, changes: Mapping[str, Any]) -> Job:
    """The job with dotted keys set; raises UserError where they cannot be together."""
    tree = job.to_dict()
    for path, value in changes.items():
        *sections, key = path.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[key] = value
    return Job.from_dict(tree)
