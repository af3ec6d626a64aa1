"""From a job to a sharded, loaded objective: one function, one order, no model names.

    objective, spec, config = build_model(job, mesh)

This is the only place where kernels and parallelism meet.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from lmms_engine.errors import UserError
from lmms_engine.kernels import attention, experts, fused_rotary, liger, loss_head, patch_embed, widen
from lmms_engine.models import hf
from lmms_engine.models.spec import Layout, ModelSpec, for_type
from lmms_engine.objectives import OBJECTIVES, build_objective
from lmms_engine.objectives.base import Objective
from lmms_engine.parallel.activation_checkpoint import Kind, choose_blocks, recompute
from lmms_engine.parallel.expert_parallel import (
    FSDP_DIM,
    TokenExchange,
    check_experts,
    check_shards,
    shard_experts,
)
from lmms_engine.parallel.freeze import apply_freeze, keep_in_eval
from lmms_engine.parallel.fsdp import Unit, apply_fsdp, materialise
from lmms_engine.parallel.mesh import Degrees, Mesh
from lmms_engine.parallel.paths import resolve, under
from lmms_engine.parallel.share_towers import share_tower
from lmms_engine.parallel.ulysses import Ulysses, check_heads, split_sequence

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lmms_engine.config import Job, TrainerSection

LOG = logging.getLogger("lmms_engine")


def build_model(
    job: Job, mesh: Mesh, *, load_weights: bool = True
) -> tuple[Objective, ModelSpec, PretrainedConfig]:
    """The objective on this rank's device, sharded.

    load_weights: False leaves the parameters undefined, for a checkpoint that is loaded next.
    """
    config = hf.read_config(job.model)
    spec = for_type(config.model_type)
    check_layout(job, spec, config, mesh)
    exchange = Ulysses(mesh.sp) if mesh.sp is not None else None
    model = hf.build_meta(spec, config)
    apply_kernels(model, spec, job, mesh.device, exchange)
    apply_sequence_parallel(model, spec, exchange)
    apply_expert_parallel(model, spec.layout, job.trainer, mesh)
    objective = build_objective(spec, model, config, job)
    objective.sequence_group = mesh.sp
    parallelize(objective, spec.layout, mesh, job.trainer)
    source, seed = job.model.load_from_pretrained_path, job.trainer.seed
    weights = (lambda: hf.weight_stream(spec, config, source, seed)) if load_weights else None
    offload = job.trainer.fsdp_config.cpu_offload
    materialise(objective, model, mesh, weights, lambda: hf.buffers(spec, config), offload=offload)
    return objective, spec, config


def check_layout(job: Job, spec: ModelSpec, config: PretrainedConfig, mesh: Mesh) -> None:
    """Raises UserError for a split of the ranks that this family cannot have, before anything is built."""
    degrees = Degrees.of(job.trainer, mesh.world_size)
    assert degrees == Degrees(mesh.sp_size, mesh.ep_size, mesh.shard_size), "a mesh of another job"
    routed = config.get_text_config() if spec.layout.experts is not None else None
    check_experts(degrees.ep, getattr(routed, "num_experts", None), spec.name)
    if degrees.sp == 1:
        return
    if not getattr(OBJECTIVES.get(spec.objective), "shares_sequences", False):
        raise UserError(
            f"trainer_args.sp_ulysses_degree={degrees.sp}: ranks cannot share a sequence of {spec.name} "
            f"({spec.objective}) (legal: 1)"
        )
    for sub_config, role in spec.layout.attention.items():
        if role == "decoder":
            part = getattr(config, sub_config) if sub_config else config
            check_heads(part.num_attention_heads, part.num_key_value_heads, degrees.sp)


def apply_sequence_parallel(model: nn.Module, spec: ModelSpec, exchange: Ulysses | None) -> None:
    """Makes the decoder take its part of every sequence; its attention already exchanges heads for tokens."""
    if exchange is not None:
        decoder = model.get_submodule(spec.layout.decoder)
        split_sequence(decoder, spec.shard_inputs, exchange.rank, exchange.size)
        if spec.shard_pictures is not None:
            for pattern in spec.layout.encoders:
                for tower in resolve(model, pattern).values():
                    merge = tower.spatial_merge_size
                    share_tower(tower, spec.shard_pictures, spec.tower_features, merge, exchange.group)


def apply_expert_parallel(model: nn.Module, layout: Layout, trainer: TrainerSection, mesh: Mesh) -> None:
    """Our experts in place of the library's, on the ranks of `mesh.ep` where they are spread over several."""
    if layout.experts is None:
        return
    modules = resolve(model, layout.experts)
    if mesh.ep is None and not trainer.use_rmpad:   # the reference path is the library's throughout
        experts.use(model, modules, experts.LIBRARY)
        return
    dtype = torch.bfloat16 if computes_in_bf16(trainer, mesh.device) else torch.float32
    product = experts.resolve(list(modules.values()), mesh.device, dtype)
    exchange = None if mesh.ep is None else TokenExchange(mesh.ep.get_group())
    experts.use(model, modules, experts.install(product, exchange))
    if mesh.ep is not None:
        check_shards(modules, mesh.efsdp)
        shard_experts(modules, mesh.ep)


def apply_kernels(
    model: nn.Module,
    spec: ModelSpec,
    job: Job,
    device: torch.device,
    exchange: attention.Exchange | None = None,
) -> None:
    """Attention, fused modules and the loss head, each by registration or module swap."""
    fused = job.trainer.use_liger_kernel and device.type == "cuda"
    if job.trainer.use_liger_kernel and not fused:
        LOG.info("use_liger_kernel: no GPU here, so the plain modules run instead")
    if job.trainer.use_rmpad:
        dtype = torch.bfloat16 if computes_in_bf16(job.trainer, device) else torch.float32
        backend = attention.resolve(job.model.attn_implementation, device, dtype)
        names = attention.install(backend, exchange)
        patch_embed.apply_patch_projection(model)
        fused_rotary.fuse_rotary(model)
    else:
        names = attention.LIBRARY
    attention.use(model, spec.layout.attention, names)
    if fused:
        swapped = liger.swap(model, spec)
        counts = ", ".join(f"{count} {name}" for name, count in swapped.items())
        LOG.info("fused modules: %s", counts or "none in this family")
    elif device.type == "cuda" and (widened := widen.apply_widening(model)):
        LOG.info("widened to a multiple of %d: %d MLPs", widen.MULTIPLE, widened)
    if spec.layout.head is not None:
        loss_head.replace_head(model, spec.layout.head, fused=fused)


def computes_in_bf16(trainer: TrainerSection, device: torch.device) -> bool:
    """`bf16: true` holds on a GPU; a CPU computes in float32 whatever it says."""
    return trainer.bf16 and device.type == "cuda"


def parallelize(objective: Objective, layout: Layout, mesh: Mesh, trainer: TrainerSection) -> None:
    """Freezes, marks for recomputation and shards, in this order. Logs what was resolved to what."""
    model, settings = objective.model, trainer.fsdp_config
    assert all(p.dtype.itemsize == 4 for p in model.parameters()), "master weights are float32"
    frozen = apply_freeze(model, trainer.freeze_modules)
    keep_in_eval(objective, [model.get_submodule(name) for name in frozen])
    blocks = {name: block for pattern in layout.blocks for name, block in resolve(model, pattern).items()}
    encoders = {name: tower for pattern in layout.encoders for name, tower in resolve(model, pattern).items()}
    check_wrapped_classes(settings.transformer_layer_cls_to_wrap, blocks, encoders)
    recomputed = choose_blocks(model, settings.activation_checkpointing, blocks, encoders)
    for name, kind in recomputed.items():
        recompute(blocks[name], kind)
    spread = resolve(model, layout.experts) if layout.experts is not None and mesh.ep is not None else {}
    units = [Unit(name, (module,), mesh.efsdp, FSDP_DIM) for name, module in spread.items()]
    units += plan_units(model, layout, blocks, encoders)
    table = format_table(objective, layout, units, blocks, recomputed, frozen)
    bf16 = computes_in_bf16(trainer, mesh.device)
    if trainer.deepspeed is None:   # otherwise ZeRO partitions what is filled, in its backend
        reshard, offload = settings.reshard_after_forward, settings.cpu_offload
        apply_fsdp(objective, units, mesh, bf16=bf16, reshard_after_forward=reshard, offload=offload)
    if mesh.is_main:
        compute = "bfloat16" if bf16 else "float32"
        split = f"{mesh.world_size} ranks, {mesh.shard_size} to a copy of the parameters"
        split += f", {mesh.sp_size} to a sequence" if mesh.sp_size > 1 else ""
        split += f", {mesh.ep_size} to a set of experts" if mesh.ep_size > 1 else ""
        split += ", offloaded to the host" if settings.cpu_offload else ""
        LOG.info("model: %s compute, float32 masters, %s\n%s", compute, split, table)


def plan_units(
    model: nn.Module, layout: Layout, blocks: dict[str, nn.Module], encoders: dict[str, nn.Module]
) -> list[Unit]:
    """What is gathered together: each block, the rest of each tower, the embedding, and norm with head.

    Inner units come first. A head tied to the embedding shares its unit.
    """
    units = [Unit(name, (block,)) for name, block in blocks.items()]
    units += [Unit(name, (tower,)) for name, tower in encoders.items()]
    ends = {path: model.get_submodule(path) for path in (layout.embed, layout.norm, layout.head) if path}
    if len(ends) < 3:   # no language model: what it has of these is small and goes to the root
        return units
    embed, norm, head = ends.values()
    if {id(p) for p in embed.parameters()} & {id(p) for p in head.parameters()}:
        units.append(Unit(f"{layout.embed}, {layout.norm}, {layout.head} (tied)", (embed, norm, head)))
    else:
        units.append(Unit(layout.embed, (embed,)))
        units.append(Unit(f"{layout.norm}, {layout.head}", (norm, head)))
    return units


def check_wrapped_classes(
    given: str | Sequence[str] | None, blocks: dict[str, nn.Module], encoders: dict[str, nn.Module]
) -> None:
    """`transformer_layer_cls_to_wrap`, if given, names the classes of the layout's blocks.

    All of them, or all outside the towers: the reference system's files name the decoder's alone.
    """
    if given is None:
        return
    named = {given} if isinstance(given, str) else set(given)
    ours = {type(block).__name__ for block in blocks.values()}
    decoder = {type(block).__name__ for name, block in blocks.items() if not under(name, encoders)}
    if named not in (ours, decoder):
        raise UserError(
            f"trainer_args.fsdp_config.transformer_layer_cls_to_wrap={sorted(named)}: this model's blocks "
            f"are {sorted(ours)} (legal: all of them, {sorted(decoder)} alone, or null)"
        )


def format_table(
    objective: Objective,
    layout: Layout,
    units: list[Unit],
    blocks: dict[str, nn.Module],
    recomputed: dict[str, Kind],
    frozen: list[str],
) -> str:
    """Patterns and what they matched, with trainable and frozen parameter counts. Call it before sharding."""
    spread = [unit for unit in units if unit.mesh is not None]
    alone = [unit for unit in units if unit.name not in blocks and unit.mesh is None]
    width = max(len(name) for name in (*layout.blocks, layout.experts or "", *(u.name for u in alone)))
    lines = [f"  {'unit':<{width}} {'modules':>7} {'recompute':>13} {'parameters':>15} {'trainable':>15}"]
    counted: set[int] = set()

    def row(name: str, modules: list[nn.Module], again: str = "") -> None:
        total = trainable = 0
        for parameter in (p for module in modules for p in module.parameters()):
            if id(parameter) not in counted:
                counted.add(id(parameter))
                total += parameter.numel()
                trainable += parameter.numel() * parameter.requires_grad
        lines.append(f"  {name:<{width}} {len(modules):>7} {again:>13} {total:>15,} {trainable:>15,}")

    if spread:
        row(layout.experts, [module for unit in spread for module in unit.modules])
    for pattern in layout.blocks:
        matched = resolve(objective.model, pattern)
        how = Counter(recomputed[name] for name in matched if name in recomputed)
        row(pattern, list(matched.values()), ", ".join(f"{how[kind]} {kind}" for kind in how) or "no")
    for unit in alone:
        row(unit.name, list(unit.modules))
    row("root: all the rest", [objective])
    parameters = list(objective.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    total = sum(p.numel() for p in parameters)
    lines.append(f"  {trainable:,} of {total:,} parameters are trained, {total - trainable:,} are frozen")
    if frozen:
        lines.append(f"  frozen: {', '.join(frozen)}")
    return "\n".join(lines)
