"""The pad id of a model's config is a token like others: nothing is padded, and nothing known by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmms_engine.config import Job
from lmms_engine.models.spec import MODELS
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train.parallelize import build_model
from tests import toy
from tests.tiny import CPU, DECODERS, pack


def job_of(folder: Path, **trainer: Any) -> Job:
    return Job.from_dict(
        {
            "model_config": {"load_from_pretrained_path": str(folder)},
            "dataset_config": {"datasets": [{"path": "unused.jsonl"}]},
            "trainer_args": {"fsdp_config": {"activation_checkpointing": False}, **trainer},
        }
    )


@pytest.mark.parametrize("use_rmpad", [True, False])
@pytest.mark.parametrize("family", DECODERS)
def test_another_pad_id_changes_nothing(family: str, use_rmpad: bool, mesh: Mesh, tmp_path: Path) -> None:
    """Pad id 0 with token 0 in the text, and that of an answer's end: equal hidden states and gradients,
    packed and padded; also of the pad token's own embedding, which the library would leave out."""
    model, samples = MODELS.get(family).tiny()
    model.save_pretrained(tmp_path)
    *_, text = samples
    text.input_ids[:2] = 0
    ends = int(text.labels[text.labels != -100][0])   # is learnt, and read by what comes after it
    batch = pack(samples)
    raw = json.loads((tmp_path / "config.json").read_text())
    seen: list[tuple[Tensor, float, dict[str, Tensor]]] = []
    for pad in (None, 0, ends):
        raw.get("text_config", raw)["pad_token_id"] = pad
        (tmp_path / "config.json").write_text(json.dumps(raw))
        objective, spec, config = build_model(job_of(tmp_path, use_rmpad=use_rmpad), mesh)
        assert config.get_text_config().pad_token_id == pad
        assert objective.weights(batch)["ce"] == sum(sample.supervised for sample in samples)
        states: list[Tensor] = []
        head = objective.model.get_submodule(spec.layout.head)
        head.register_forward_pre_hook(lambda _, args, states=states: states.append(args[0].detach()))
        loss = objective(batch.to(CPU))["ce"]
        loss.backward()
        seen.append((states[0], float(loss.detach()), toy.gradients(objective.model)))
    (expected, loss, gradients), *others = seen
    embed = next(name for name in gradients if name.endswith("embed_tokens.weight"))
    assert gradients[embed][0].abs().max() > 0
    assert gradients[embed][ends].abs().max() > 0
    for hidden, value, own in others:
        assert torch.equal(hidden, expected)
        assert value == loss
        assert own.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert torch.equal(own[name], gradient), name
