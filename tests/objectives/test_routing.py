"""The routers' terms: known values, and what must not change them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from lmms_engine.models.spec import MODELS
from lmms_engine.objectives import routing
from lmms_engine.objectives.next_token import NextToken
from lmms_engine.objectives.routing import router_sums
from lmms_engine.parallel.activation_checkpoint import recompute
from lmms_engine.parallel.paths import resolve
from lmms_engine.segments import Segments
from lmms_engine.train.step import combine, total_weights
from tests.tiny import CPU, assert_same_gradients, build, pack

FAMILY = "qwen3_moe"


def mean(logits: list[Tensor], lengths: list[int], rows: int, top_k: int) -> dict[str, float]:
    sums = router_sums(logits, Segments.from_lengths(lengths), rows, top_k=top_k)
    return {term: float(value) / sum(lengths[:rows]) for term, value in sums.items()}


def test_all_tokens_on_one_expert() -> None:
    """8 experts, logits [4, 0, …]: 8 * e^4 / (e^4 + 7) = 7.09; a second softmax would give 2.03."""
    logits = F.pad(torch.full((64, 1), 4.0), (0, 7))
    got = mean([logits], [64], 1, 1)
    assert got["aux"] == pytest.approx(7.0909, abs=1e-3)
    assert got["z"] == pytest.approx(float(torch.tensor([4.0] + [0.0] * 7).logsumexp(0)) ** 2, rel=1e-5)
    assert got["expert_load"] == pytest.approx(8.0)
    padded = torch.cat([logits, torch.randn(64, 8)])
    assert mean([padded], [64, 64], 1, 1) == pytest.approx(got, rel=1e-6)   # a stand-in counts in nothing
    assert mean([logits, logits], [64], 1, 1) == pytest.approx(got, rel=1e-6)   # nor does the depth


def test_one_row_equals_the_librarys_loss() -> None:
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    theirs = load_balancing_loss_func((logits,), num_experts=8, top_k=3)
    assert mean([logits], [50], 1, 3)["aux"] == pytest.approx(float(theirs), rel=1e-5)


def test_even_routing_gives_top_k() -> None:
    logits = torch.eye(8).repeat(4, 1) * 1e-3
    got = mean([logits], [32], 1, 1)
    assert got["aux"] == pytest.approx(1.0, rel=1e-6)
    assert got["expert_load"] == pytest.approx(1.0)


def test_a_row_does_not_know_what_it_is_packed_with() -> None:
    rng = torch.Generator().manual_seed(1)
    rows = [torch.randn(n, 8, generator=rng) for n in (5, 17, 9)]
    together = router_sums([torch.cat(rows)], Segments.from_lengths([5, 17, 9]), 3, top_k=2)
    alone = [router_sums([row], Segments.from_lengths([len(row)]), 1, top_k=2) for row in rows]
    for term, value in together.items():
        assert float(value) == pytest.approx(sum(float(sums[term]) for sums in alone), rel=1e-6)


def objective(*, aux: float = 0.0, z: float = 0.0, ce: float = 0.0, rmpad: bool = True) -> NextToken:
    made, _ = build(FAMILY, rmpad=rmpad)
    made.coefficients.update(ce=ce, aux=aux, z=z)
    return made


def gradients(made: NextToken, packs: list[list[int]]) -> dict[str, Tensor]:
    """Of the global loss over micro-batches of the tiny samples with these numbers."""
    _, samples = build(FAMILY)
    micros = [pack([samples[i] for i in numbers]) for numbers in packs]
    totals = total_weights(made, micros)
    for micro in micros:
        combine(made(micro.to(CPU)), totals, made.coefficients).backward()
    return {
        name: p.grad if p.grad is not None else torch.zeros_like(p)
        for name, p in made.model.named_parameters()
        if not name.startswith(("lm_head", "model.norm", "model.layers.2.mlp.experts"))   # aux is before them
    }


@pytest.mark.parametrize("term", ["aux", "z"])
def test_accumulation_packing_and_recomputation_change_nothing(term: str) -> None:
    want = gradients(objective(**{term: 1.0}), [[0, 1, 2, 3]])
    assert float(want["model.layers.2.mlp.gate.weight"].abs().max()) > 0
    assert_same_gradients(gradients(objective(**{term: 1.0}), [[0], [1], [2], [3]]), want)
    assert_same_gradients(gradients(objective(**{term: 1.0}), [[3, 1], [2, 0]]), want)
    assert_same_gradients(gradients(objective(**{term: 1.0}, rmpad=False), [[0, 1, 2, 3]]), want)
    again = objective(**{term: 1.0})
    for block in resolve(again.model, "model.layers.*").values():
        recompute(block, "full")
    assert_same_gradients(gradients(again, [[0, 1], [2, 3]]), want)


def test_four_equal_micro_batches_give_what_one_gives() -> None:
    one = gradients(objective(aux=1.0), [[0, 1]])
    assert_same_gradients(gradients(objective(aux=1.0), [[0, 1]] * 4), one)


def test_recomputation_counts_every_visit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The routers' logits are taken in the forward alone: three layers, once each, three experts a token."""
    counted: list[float] = []

    def count(*args: Any) -> Tensor:
        visits = visits_of(*args)
        counted.append(float(visits.sum()))
        return visits

    visits_of = routing._visits
    monkeypatch.setattr(routing, "_visits", count)
    made = objective(aux=1.0, ce=1.0)
    for block in resolve(made.model, "model.layers.*").values():
        recompute(block, "full")
    _, samples = build(FAMILY)
    batch = pack(samples).to(CPU)
    _, logits = made._run(batch)
    assert [tuple(layer.shape) for layer in logits] == [(batch.input_ids.numel(), 8)] * 3
    first = made(batch)
    combine(first, total_weights(made, [pack(samples)]), made.coefficients).backward()
    assert counted == [3 * batch.input_ids.numel()] * 3
    again = {term: value.item() for term, value in made(batch).items()}
    assert again == {term: value.item() for term, value in first.items()}


def test_stand_ins_count_in_nothing() -> None:
    _, samples = build(FAMILY)
    made = objective(aux=1.0, z=1.0)
    alone, beside = pack(samples[:2]), pack([*samples[:2], samples[3]], stand_ins=1)
    assert made.weights(beside)["aux"] == made.weights(alone)["aux"] == len(samples[0]) + len(samples[1])
    for term in ("aux", "z", "expert_load"):
        assert float(made(beside.to(CPU))[term]) == pytest.approx(float(made(alone.to(CPU))[term]), rel=1e-6)


def test_coefficients_are_the_librarys_and_ours() -> None:
    made, _ = build(FAMILY)
    config = made.model.config
    assert made.coefficients == {"ce": 1.0, "aux": 0.0, "z": 0.0, "expert_load": 0.0}
    config.output_router_logits, config.router_aux_loss_coef = True, 0.01
    on = NextToken(made.model, MODELS.get(FAMILY), config, router_z_loss_coef=0.5)
    assert on.coefficients == {"ce": 1.0, "aux": 0.01, "z": 0.5, "expert_load": 0.0}
