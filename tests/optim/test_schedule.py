import math

import pytest

from lmms_engine.errors import UserError
from lmms_engine.optim.schedule import SHAPES, build_schedule
from tests import toy


def factors(steps, **trainer):
    schedule = build_schedule(toy.job(max_steps=steps, **trainer).trainer)
    return [schedule(step / steps, step) for step in range(1, steps + 1)]


def test_linear():
    assert factors(4, lr_scheduler_type="linear") == [0.75, 0.5, 0.25, 0.0]


def test_cosine():
    want = [0.5 * (1 + math.cos(math.pi * t)) for t in (0.25, 0.5, 0.75, 1.0)]
    assert factors(4, lr_scheduler_type="cosine") == pytest.approx(want, abs=1e-15)


def test_constant():
    assert factors(3, lr_scheduler_type="constant") == [1.0, 1.0, 1.0]


def test_wsd_is_stable_and_then_falls():
    got = factors(10, lr_scheduler_type="wsd", lr_scheduler_kwargs={"decay_ratio": 0.5})
    assert got == pytest.approx([1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.0])


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_a_floor_is_where_it_ends(name):
    got = factors(20, lr_scheduler_type=name, warmup_ratio=0.1, lr_scheduler_kwargs={"min_lr_ratio": 0.25})
    assert got[-1] == 0.25
    assert min(got[2:]) == 0.25
    assert max(got) == pytest.approx(1.0)


@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize("warmup", [{"warmup_ratio": 0.2}, {"warmup_steps": 4}])
def test_warm_up_rises_to_the_full_rate_then_the_shape_starts(name, warmup):
    got = factors(20, lr_scheduler_type=name, **warmup)
    assert got[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    final = {"constant": 1.0}.get(name, 0.0)
    assert got[-1] == final   # exactly: the last rate is the schedule's final value


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_warm_up_in_steps_needs_no_known_length(name):
    # 9 unequal steps of an epoch-based run: 3 epochs of windows 4, 4 and 2 of 10 micro-batches
    progress = [done / 30 for epoch in range(3) for done in (epoch * 10 + 4, epoch * 10 + 8, epoch * 10 + 10)]
    trainer = toy.job(num_train_epochs=3, lr_scheduler_type=name, warmup_steps=3).trainer
    got = [build_schedule(trainer)(p, i + 1) for i, p in enumerate(progress)]
    assert got[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert got[-1] == {"constant": 1.0}.get(name, 0.0)


def test_it_has_no_memory():
    schedule = build_schedule(toy.job(lr_scheduler_type="cosine", warmup_ratio=0.1).trainer)
    forward = [schedule(step / 50, step) for step in range(1, 51)]
    backward = [schedule(step / 50, step) for step in range(50, 0, -1)]
    assert forward == backward[::-1]


def test_a_warm_up_longer_than_the_run_only_rises():
    assert factors(3, lr_scheduler_type="linear", warmup_steps=6) == pytest.approx([1 / 6, 2 / 6, 3 / 6])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"min_lr": 0.1}, r"min_lr: the schedule 'cosine' takes min_lr_ratio; did you mean 'min_lr_ratio'"),
        ({"decay_ratio": 0.1}, "decay_ratio: the schedule 'cosine' takes min_lr_ratio"),
        ({"min_lr_ratio": 1.5}, r"min_lr_ratio=1.5 \(legal: a number in \[0, 1\]\)"),
    ],
)
def test_options_that_the_schedule_does_not_have_are_errors(kwargs, message):
    trainer = toy.job().trainer.model_copy(
        update={"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": kwargs}
    )
    with pytest.raises(UserError, match=message):
        build_schedule(trainer)


def test_a_decay_of_no_length_and_an_unknown_name_are_errors():
    base = toy.job().trainer
    wsd = base.model_copy(update={"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"decay_ratio": 0}})
    with pytest.raises(UserError, match="decay_ratio=0"):
        build_schedule(wsd)
    with pytest.raises(UserError, match="did you mean 'cosine'"):
        build_schedule(base.model_copy(update={"lr_scheduler_type": "cosin"}))
