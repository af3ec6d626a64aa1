import pytest
import torch
from torch import nn

from lmms_engine.optim.groups import build_adamw, build_groups, format_groups
from tests import toy


class Odd(nn.Module):
    """Parameters whose kind only their name, or the module's, tells."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 4))
        self.position_embedding = nn.Parameter(torch.zeros(3, 4))
        self.in_proj_bias = nn.Parameter(torch.zeros(2, 2))
        self.conv = nn.Conv2d(3, 4, 2)
        self.group_norm = nn.GroupNorm(2, 4)


def names(groups):
    return {group.name: set(group.params) for group in groups}


@pytest.mark.parametrize("tied", [True, False])
def test_every_trainable_parameter_is_in_exactly_one_group(tied):
    model = toy.ToyModel(tied=tied)
    model.model.visual.merger.requires_grad_(False)
    groups = build_groups(model, 0.1)
    listed = [id(p) for group in groups for p in group.params.values()]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(p) for p in model.parameters() if p.requires_grad}


def test_norms_biases_and_embeddings_do_not_decay():
    groups = build_groups(toy.ToyModel(tied=False), 0.1)
    assert {group.name: group.weight_decay for group in groups} == {"decay": 0.1, "no_decay": 0.0}
    decay = names(groups)["decay"]
    assert "lm_head.weight" in decay   # an untied head is a matrix like others
    assert {name.rsplit(".", 2)[-2] for name in decay} == {"up", "down", "patch_embed", "merger", "lm_head"}
    assert all(name.endswith(".weight") for name in decay)
    assert "model.visual.pos_embed" in names(groups)["no_decay"]


def test_a_tied_head_does_not_decay():
    tied = names(build_groups(toy.ToyModel(tied=True), 0.1))
    assert "model.language_model.embed_tokens.weight" in tied["no_decay"]
    assert "lm_head.weight" not in tied["decay"] | tied["no_decay"]   # one parameter, one name


def test_names_tell_where_types_do_not():
    groups = names(build_groups(Odd(), 0.1))
    assert groups["decay"] == {"conv.weight"}
    assert groups["no_decay"] == {
        "cls_token",
        "position_embedding",
        "in_proj_bias",
        "conv.bias",
        "group_norm.weight",
        "group_norm.bias",
    }


def test_an_empty_group_is_left_out():
    assert [g.name for g in build_groups(nn.LayerNorm(3), 0.1)] == ["no_decay"]


def test_the_table_states_what_is_in_the_groups():
    table = format_groups(build_groups(nn.Linear(100, 20), 0.1))
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["decay", "0.1", "1", "2,000"],
        ["no_decay", "0", "1", "20"],
    ]


def test_only_the_decay_group_decays():
    model = toy.ToyModel(tied=True)
    job = toy.job(weight_decay=0.5, learning_rate=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-7)
    groups = build_groups(model, job.trainer.weight_decay)
    optimizer = build_adamw(groups, job.trainer)
    assert all(g["betas"] == (0.8, 0.9) and g["eps"] == 1e-7 for g in optimizer.param_groups)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    after = dict(model.named_parameters())
    for group in groups:
        for name in group.params:
            factor = 0.95 if group.name == "decay" else 1.0
            torch.testing.assert_close(after[name].detach(), before[name] * factor)
