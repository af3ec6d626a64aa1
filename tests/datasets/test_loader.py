"""The loader: same batches whatever the workers, exact resume on any number of ranks, clear failures."""

from __future__ import annotations

import gc
import json
import operator
import os
import random
import signal
import time
from dataclasses import replace
from fractions import Fraction
from functools import partial, reduce
from itertools import zip_longest
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from data_prep.clips import write_clip
from lmms_engine.datasets import BaseDataset, register_dataset
from lmms_engine.datasets.collate import TOKEN_DIMS
from lmms_engine.datasets.loader import Loader, merge_states
from lmms_engine.datasets.sample import Sample
from lmms_engine.datasets.schema import Row
from lmms_engine.datasets.skips import check_budget
from lmms_engine.errors import BadRow, UserError
from lmms_engine.segments import RowRef
from tests.datasets.toy_data import (
    ByteProcessor,
    content,
    ids_of,
    ids_of_epoch,
    make_job,
    make_loader,
    steps_of_epoch,
    text_row,
    write_jsonl,
)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """60 rows of 10 to 32 tokens, some with a picture."""
    (tmp_path / "a.png").write_bytes(b"picture")
    made = [text_row(f"r{i}", 10 + i * 7 % 23) for i in range(60)]
    for row in made[::3]:
        row["image"] = "a.png"
    return write_jsonl(tmp_path / "rows.jsonl", made)


# Batches ---------------------------------------------------------------------------------------------


def batches(rows: Path, workers: int, method: str = "fork", **keys: Any) -> list[Any]:
    job = make_job(rows, dataloader_num_workers=workers, gradient_accumulation_steps=3, **keys)
    loader = make_loader(job, start_method=method)
    first = steps_of_epoch(loader)
    loader.next_epoch()
    second = [loader.next_step() for _ in range(2)]
    loader.close()
    return [[content(micro) for micro in micros] for micros in first + second]


@pytest.mark.parametrize("keys", [{}, {"per_device_train_batch_size": 2}, {"packing": False}])
def test_batches_are_byte_equal_for_any_number_of_workers(rows: Path, keys: dict[str, Any]) -> None:
    alone = batches(rows, 0, **keys)
    for workers in (1, 2, 3):
        assert batches(rows, workers, **keys) == alone


def test_batches_are_byte_equal_in_spawned_workers(rows: Path) -> None:
    assert batches(rows, 1, "spawn", per_device_train_batch_size=2) == batches(
        rows, 0, per_device_train_batch_size=2
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_slices_of_two_ranks_of_a_sequence_join_to_the_row_whatever_their_workers(
    rows: Path, method: str
) -> None:
    """One rank reads in its own process, the other in a worker, which need not know of the split."""
    keys = {"per_device_train_batch_size": 2, "sp_ulysses_degree": 2}
    alone = make_loader(make_job(rows, **keys))
    other = make_loader(make_job(rows, dataloader_num_workers=1, **keys), start_method=method)
    for _ in range(3):
        (whole,), (micro,) = alone.next_step(), other.next_step()
        assert content(micro) == content(whole)
        parts = [whole.shard(0, 2), micro.shard(1, 2)]
        for name in ("labels", "loss_weights"):
            joined = torch.cat([getattr(part, name) for part in parts])
            assert torch.equal(joined[: whole.input_ids.numel()], getattr(whole, name))
        assert len({part.labels.numel() for part in parts}) == 1
    other.close()


def test_packs_hold_every_row_once_and_never_too_much(rows: Path) -> None:
    steps = steps_of_epoch(make_loader(make_job(rows, gradient_accumulation_steps=4)))
    assert sorted(ids_of(steps)) == sorted(f"r{i}" for i in range(60))
    assert [len(micros) for micros in steps[:-1]] == [4] * (len(steps) - 1)
    for micro in (micro for micros in steps for micro in micros):
        assert 0 < micro.num_tokens <= 64
        assert "pixel_values" in micro.media


def test_several_packs_are_joined_in_one_sequence(rows: Path) -> None:
    single = [m for micros in steps_of_epoch(make_loader(make_job(rows))) for m in micros]
    double = [
        m
        for micros in steps_of_epoch(make_loader(make_job(rows, per_device_train_batch_size=2)))
        for m in micros
    ]
    pairs = zip_longest(single[::2], single[1::2])
    assert [m.rows for m in double] == [a.rows + (b.rows if b else ()) for a, b in pairs]
    assert all(sum(row.startswith("stand-in") for row, *_ in m.rows) == 0 for m in double)


def test_ten_micro_batches_in_windows_of_four_are_nine_steps_in_three_epochs(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [text_row(f"r{i}") for i in range(10)])
    loader = make_loader(make_job(path, packing=False, gradient_accumulation_steps=4, num_logical_shards=4))
    windows = []
    for _ in range(3):
        steps = steps_of_epoch(loader)
        assert sorted(ids_of(steps)) == sorted(f"r{i}" for i in range(10))
        windows += [len(micros) for micros in steps]
        loader.next_epoch()
    assert windows == [4, 4, 2] * 3


def test_progress_runs_from_0_to_the_number_of_epochs(rows: Path) -> None:
    loader = make_loader(make_job(rows))
    assert (loader.progress(), loader.rows_per_epoch) == (0.0, 60)
    seen = [0.0]
    for epoch in range(2):
        with pytest.raises(RuntimeError, match="not over"):
            loader.next_epoch()
        while loader.next_step():
            seen.append(loader.progress())
        assert loader.progress() == epoch + 1
        loader.next_epoch()
    assert seen == sorted(seen)
    assert 0 < seen[1] < 0.2


def test_ranks_with_unlike_numbers_of_packs(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [text_row(f"r{i}", 60 if i % 2 else 12) for i in range(10)])
    ranks = [make_loader(make_job(path, shuffle=False, num_logical_shards=2), rank, 2) for rank in (0, 1)]
    counts = [len(steps_of_epoch(rank)) for rank in ranks]
    assert counts == [1, 5]
    empty = ranks[0].empty()
    assert (empty.rows, float(empty.loss_weights.sum())) == ((), 0.0)
    lonely = write_jsonl(tmp_path / "one.jsonl", [text_row("only")])
    assert ids_of_epoch(make_job(lonely, num_logical_shards=2), 2) == [["only"], []]


def test_loading_leaves_the_random_state_alone(rows: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    loader = make_loader(make_job(rows, dataloader_num_workers=1))
    steps_of_epoch(loader)
    loader.close()
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_gives_every_row_once_in_each_pass(rows: Path) -> None:
    job = make_job(rows, eval_datasets=[{"path": str(rows)}], dataloader_num_workers=1)
    loaders = [make_loader(job, rank, 2, split="eval") for rank in (0, 1)]
    passes = []
    for _ in range(2):
        passes.append([ids_of(steps_of_epoch(loader)) for loader in loaders])
        for loader in loaders:
            loader.next_epoch()
            loader.close()
    assert passes[0] == passes[1]
    assert sorted(reduce(operator.iadd, passes[0], [])) == sorted(f"r{i}" for i in range(60))


# Resume ----------------------------------------------------------------------------------------------


def save(loaders: list[Loader]) -> dict[str, Any]:
    return json.loads(json.dumps(merge_states([loader.state_dict() for loader in loaders])))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [0, 1, 4, 100])
def test_resume_equals_going_on(rows: Path, workers: int, steps: int) -> None:
    job = make_job(rows, gradient_accumulation_steps=2)
    whole = make_loader(job)
    for _ in range(steps):
        whole.next_step()
    state = save([whole])

    resumed = make_loader(make_job(rows, gradient_accumulation_steps=2, dataloader_num_workers=workers))
    resumed.load_state_dict(state)
    for _ in range(2):
        assert resumed.progress() == whole.progress()
        ours, theirs = (
            [[content(m) for m in micros] for micros in steps_of_epoch(each)] for each in (resumed, whole)
        )
        assert ours == theirs
        resumed.next_epoch()
        whole.next_epoch()
    resumed.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_balanced_packs_resume_and_do_not_depend_on_workers(tmp_path: Path, workers: int) -> None:
    # 50 of 64 tokens cost 50 + 50²/40 = 112: dear, held back. The others cost 10.3 to 57.
    path = write_jsonl(tmp_path / "a.jsonl", [text_row(f"r{i}", (50, 9, 17, 30)[i % 4]) for i in range(160)])
    kwargs = {"open_bins": 8, "cost_budget": 1.2, "attention_length": 40.0, "media_cost": 0.0}
    keys = {"packing_strategy": "balanced", "packing_kwargs": kwargs, "num_logical_shards": 2}
    whole = make_loader(make_job(path, **keys), stand_in=False)
    steps = steps_of_epoch(whole)
    assert sorted(ids_of(steps)) == sorted(f"r{i}" for i in range(160))
    lengths = [micro.segments.lengths() for micros in steps for micro in micros]
    assert all(len(pack) == 1 or sum(n + n * n / 40 for n in pack) <= 1.2 * 64 for pack in lengths)
    for count in (1, 30):  # before and after the first turn of the dear ones
        first = make_loader(make_job(path, dataloader_num_workers=workers, **keys), stand_in=False)
        begun = [first.next_step() for _ in range(count)]
        resumed = make_loader(make_job(path, dataloader_num_workers=workers, **keys), stand_in=False)
        resumed.load_state_dict(save([first]))
        rest = steps_of_epoch(resumed)
        assert [[content(m) for m in micros] for micros in begun + rest] == [
            [content(m) for m in micros] for micros in steps
        ]
        first.close()
        resumed.close()
    state = save([make_loader(make_job(path, **keys))])
    keys["packing_kwargs"] = {**kwargs, "attention_length": 41.0}
    with pytest.raises(UserError, match=r"attention_length was 40\.0 and is 41\.0"):
        make_loader(make_job(path, **keys)).load_state_dict(state)


def test_dear_packs_keep_their_turns_after_a_resume_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    lengths = random.Random(3).choices([8, 10, 60], k=300)
    path = write_jsonl(tmp_path / "a.jsonl", [text_row(f"r{i}", n) for i, n in enumerate(lengths)])
    kwargs = {"open_bins": 64, "cost_budget": 0.5, "attention_length": 16.0}
    keys = {"packing_strategy": "balanced", "packing_kwargs": kwargs, "num_logical_shards": 3}
    whole = make_loader(make_job(path, **keys))
    state: dict[str, Any] = {}
    while whole.next_step():
        now = save([whole])
        if {shard["ended"] for shard in now["shards"].values()} == {False, True}:
            state = now   # one shard is through, others are not
    assert state
    resumed = make_loader(make_job(path, **keys))
    resumed.load_state_dict(state)
    steps_of_epoch(resumed)
    for each in (whole, resumed):
        each.next_epoch()
    assert [ids_of([step]) for step in steps_of_epoch(resumed)] == [
        ids_of([step]) for step in steps_of_epoch(whole)
    ]


def test_a_pack_has_no_more_media_than_the_budget(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")

    def row(id_: str, pictures: int) -> dict[str, Any]:
        images = [{"type": "image_url", "image_url": {"url": "a.png"}}] * pictures
        text = {"type": "text", "text": "what"}
        user, answer = {"role": "user", "content": [*images, text]}, {"role": "assistant", "content": "ok"}
        return {"id": id_, "messages": [user, answer]}

    path = write_jsonl(tmp_path / "a.jsonl", [row(f"r{i}", i % 5) for i in range(40)])
    for strategy in ("first_fit", "best_fit", "balanced"):
        keys = {"packing_strategy": strategy, "packing_kwargs": {"media_units": 3}, "num_logical_shards": 1}
        loader = make_loader(make_job(path, **keys), stand_in=False)
        steps = steps_of_epoch(loader)
        grids = [micro.media.get("image_grid_thw") for micros in steps for micro in micros]
        assert max(len(grid) for grid in grids if grid is not None) == 3
        assert sorted(ids_of(steps)) == sorted(f"r{i}" for i in range(40) if i % 5 < 4)
        skipped = loader.take_skipped()
        assert [record.kind for record in skipped] == ["overlong"] * 8
        assert skipped[0].reason == "4 media units, more than dataset_config.packing_kwargs.media_units=3"


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (2, 1), (8, 0)])
def test_resume_with_other_ranks_and_workers_completes_the_epoch(rows: Path, size: int, workers: int) -> None:
    keys = {"num_logical_shards": 8, "packing_kwargs": {"open_bins": 4}}
    before = [make_loader(make_job(rows, dataloader_num_workers=2, **keys), rank, 4) for rank in range(4)]
    seen = [ids_of([loader.next_step() for _ in range(3)]) for loader in before]
    state = save(before)
    for loader in before:
        loader.close()
    for rank in range(size):
        loader = make_loader(make_job(rows, dataloader_num_workers=workers, **keys), rank, size)
        loader.load_state_dict(state)
        seen.append(ids_of(steps_of_epoch(loader)))
        loader.close()
    assert sorted(reduce(operator.iadd, seen, [])) == sorted(f"r{i}" for i in range(60))


@pytest.mark.parametrize("gone", ["version", "epoch", "identity", "shards", "shards.2.bins", "shards.0.seen"])
def test_a_damaged_state_is_refused_by_the_part_that_it_lacks(rows: Path, gone: str) -> None:
    state = save([make_loader(make_job(rows))])
    *parents, leaf = gone.split(".")
    del reduce(operator.getitem, parents, state)[leaf]
    with pytest.raises(UserError, match=rf"state is damaged: it lacks {gone}\. Move its checkpoint aside"):
        make_loader(make_job(rows)).load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 7}, ["trainer_args.seed was 42 and is 7"]),
        ({"num_logical_shards": 8}, ["num_logical_shards was 4 and is 8"]),
        (
            {"packing_length": 65, "shuffle": False},
            ["packing_length was 64 and is 65", "shuffle was True and is False"],
        ),
        ({"packing": False}, ["packing was True and is False"]),
    ],
)
def test_a_changed_setting_is_refused_by_name(rows: Path, changes: dict[str, Any], words: list[str]) -> None:
    state = save([make_loader(make_job(rows))])
    with pytest.raises(UserError) as caught:
        make_loader(make_job(rows, **changes)).load_state_dict(state)
    for word in words:
        assert word in str(caught.value)


def test_changed_data_or_processor_are_refused_by_name(rows: Path) -> None:
    loader = make_loader(make_job(rows))
    state, mark = save([loader]), loader.fingerprint()
    text = rows.read_text(encoding="utf-8")
    write_jsonl(rows, [*map(json.loads, text.splitlines()), text_row("new")])
    more = make_loader(make_job(rows))
    assert more.fingerprint() != mark
    with pytest.raises(UserError, match=r"dataset 'rows.jsonl': rows was 60 and is 61"):
        more.load_state_dict(state)
    rows.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"processor was 'other' and is 'bytes-1'"):
        make_loader(make_job(rows)).load_state_dict(
            {**state, "identity": {**state["identity"], "processor": "other"}}
        )
    two = make_loader(make_job(rows), 0, 2)
    with pytest.raises(UserError, match=r"lacks the logical shards \[1, 3\]"):
        make_loader(make_job(rows)).load_state_dict(two.state_dict())


def test_fewer_logical_shards_than_ranks_is_refused(rows: Path) -> None:
    with pytest.raises(UserError, match=r"num_logical_shards=2 leaves some of the 4"):
        make_loader(make_job(rows, num_logical_shards=2), 0, 4)


# Bad and overlong rows -------------------------------------------------------------------------------


def bad_file(folder: Path, count: int = 12, bad: int = 2) -> Path:
    made = [text_row(f"r{i}") for i in range(count)]
    for i in range(bad):
        made[5 + i]["image"] = f"missing-{i}.png"
    return write_jsonl(folder / "bad.jsonl", made)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_row_stops_with_its_whole_address_in_one_line(tmp_path: Path, workers: int) -> None:
    path = bad_file(tmp_path, bad=1)
    loader = make_loader(make_job(path, shuffle=False, dataloader_num_workers=workers))
    with pytest.raises(UserError) as caught:
        steps_of_epoch(loader)
    message = str(caught.value)
    for word in (
        f"source '{path}'",
        "shard 0, row 5",
        f"{path}, line 6",
        "id 'r5'",
        "missing-0.png",
        "on_bad_row=skip",
    ):
        assert word in message
    assert "\n" not in message
    assert "Traceback" not in message


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_rows_are_skipped_counted_and_named(tmp_path: Path, workers: int) -> None:
    loader = make_loader(make_job(bad_file(tmp_path), on_bad_row="skip", dataloader_num_workers=workers))
    ids = ids_of(steps_of_epoch(loader))
    loader.close()
    assert sorted(ids) == sorted(f"r{i}" for i in range(12) if i not in (5, 6))
    skipped = sorted(loader.take_skipped())
    assert [(s.row, s.id, s.kind) for s in skipped] == [
        (5, "r5", "media_missing"),
        (6, "r6", "media_missing"),
    ]
    assert "missing-0.png" in skipped[0].reason
    assert (loader.take_skipped(), loader.skipped_total, loader.progress()) == ([], 2, 1.0)


def test_a_row_that_cannot_be_parsed_is_named_by_its_id(tmp_path: Path) -> None:
    made = [text_row(f"r{i}") for i in range(4)]
    made[2]["imgs"] = ["a.png"]
    loader = make_loader(make_job(write_jsonl(tmp_path / "rows.jsonl", made), on_bad_row="skip"))
    assert sorted(ids_of(steps_of_epoch(loader))) == ["r0", "r1", "r3"]
    (record,) = loader.take_skipped()
    assert (record.id, record.row, record.kind) == ("r2", 2, "unknown_key")


def test_half_a_letter_in_a_row_is_a_bad_row_that_can_be_written_down(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(text_row(name)) + "\n" for name in ("s\ud800", "t")), encoding="utf-8")
    loader = make_loader(make_job(rows, on_bad_row="skip"))
    assert ids_of(steps_of_epoch(loader)) == ["t"]
    (record,) = loader.take_skipped()
    assert (record.id, record.kind) == (r"s\ud800", "text_invalid")


def test_as_many_bad_rows_as_the_budget_says_are_no_error() -> None:
    for bad in range(100):
        check_budget(bad, 100, bad / 100, None)
        with pytest.raises(UserError, match=f"{bad + 1} of 100 rows"):
            check_budget(bad + 1, 100, bad / 100, None)


def test_too_many_bad_rows_stop_even_with_skip(tmp_path: Path) -> None:
    path = bad_file(tmp_path, count=200, bad=150)
    loader = make_loader(make_job(path, on_bad_row="skip", max_skip_fraction=0.5))
    with pytest.raises(UserError, match=r"max_skip_fraction=0.5.*missing-"):
        steps_of_epoch(loader)
    few = make_loader(
        make_job(bad_file(tmp_path, count=20, bad=15), on_bad_row="skip", max_skip_fraction=0.5)
    )
    assert len(ids_of(steps_of_epoch(few))) == 5  # fewer than 100 rows: a fraction says nothing yet


@pytest.mark.parametrize("place", [0, 5, 9])
@pytest.mark.parametrize("packing", [True, False])
def test_a_row_longer_than_a_pack_is_dropped_and_counted(tmp_path: Path, place: int, packing: bool) -> None:
    made = [text_row(f"r{i}", 63 + i % 2) for i in range(10)]
    made[place] = text_row("long", 65)
    path = write_jsonl(tmp_path / "rows.jsonl", made)
    keys = {"packing": packing, "max_length": None if packing else 64}
    loader = make_loader(make_job(path, **keys))
    steps = steps_of_epoch(loader)
    assert sorted(ids_of(steps)) == sorted(f"r{i}" for i in range(10) if i != place)
    assert all(0 < micro.num_tokens <= 64 for micros in steps for micro in micros)
    (skipped,) = loader.take_skipped()
    assert (skipped.id, skipped.kind, loader.skipped_total) == ("long", "overlong", 1)
    assert "65 tokens, more than dataset_config." in skipped.reason
    with pytest.raises(UserError, match=rf"row {place} .*65 tokens"):
        steps_of_epoch(make_loader(make_job(path, overlong="error", **keys)))


class HalvingProcessor(ByteProcessor):
    """Shortens rows of more than 60 tokens to 30."""

    def __call__(self, row: Row, ref: RowRef) -> Sample:
        whole = super().__call__(row, ref)
        if len(whole) <= 60:
            return whole
        cut = {key: getattr(whole, key)[..., :30] for key in TOKEN_DIMS}
        return replace(whole, **cut, truncated=True)


def test_a_shortened_row_is_named_once_and_no_bad_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [text_row(f"r{i}", 50 + 12 * (i % 2)) for i in range(40)])
    job = make_job(path, overlong="truncate", on_bad_row="skip", max_skip_fraction=0.0, num_logical_shards=1)
    make = partial(Loader, job, HalvingProcessor, dp_rank=0, dp_size=1)
    whole = make()
    assert sorted(ids_of(steps_of_epoch(whole))) == sorted(f"r{i}" for i in range(40))
    named = whole.take_skipped()
    assert sorted(record.id for record in named) == sorted(f"r{i}" for i in range(1, 40, 2))
    assert {record.kind for record in named} == {"truncated"}
    assert named[0].reason == "cut at the end of a turn, to 30 tokens, for dataset_config.packing_length=64"
    assert whole.skipped_total == 0
    for count in range(1, 12, 3):   # rows that wait in open packs are read again, and not told again
        first, second = make(), make()
        for _ in range(count):
            first.next_step()
        second.load_state_dict(save([first]))
        steps_of_epoch(second)
        assert sorted([*first.take_skipped(), *second.take_skipped()]) == sorted(named)


def test_rows_without_targets_stay_in_their_packs(tmp_path: Path) -> None:
    made = [{"id": f"q{i}", "messages": [{"role": "user", "content": "only a question"}]} for i in range(4)]
    steps = steps_of_epoch(make_loader(make_job(write_jsonl(tmp_path / "rows.jsonl", made))))
    assert len(ids_of(steps)) == 4
    assert sum(sum(m.row_supervised()) for micros in steps for m in micros) == 0


# Failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fault_in_the_processor_names_the_row(tmp_path: Path, workers: int) -> None:
    made = [text_row(f"r{i}") for i in range(6)]
    made[3]["meta"] = {"crash": 1}
    path = write_jsonl(tmp_path / "rows.jsonl", made)
    loader = make_loader(make_job(path, on_bad_row="skip", dataloader_num_workers=workers))
    with pytest.raises(UserError) as caught:
        steps_of_epoch(loader)
    assert "row 3" in str(caught.value)
    assert "id 'r3'" in str(caught.value)
    assert str(caught.value).endswith("ZeroDivisionError: planted fault")
    assert "toy_data.py" in str(caught.value.__cause__)  # for --debug


class Deadly(ByteProcessor):
    """Kills its process at the third row, as the kernel does when memory runs out."""

    rows = 0

    def __call__(self, *args: Any) -> Any:
        self.rows += 1
        if self.rows == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(*args)


def test_a_killed_worker_gives_a_clear_message_soon(rows: Path) -> None:
    loader = Loader(make_job(rows, dataloader_num_workers=1), Deadly, dp_rank=0, dp_size=1)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"a data worker died .* ran out of memory\. Lower trainer_args"):
        steps_of_epoch(loader)
    assert time.monotonic() - began < 30


class Collecting(ByteProcessor):
    """Collects garbage at every row."""

    def __call__(self, *args: Any) -> Any:
        gc.collect()
        return super().__call__(*args)


class Cycle:
    """Holds itself, so that only the garbage collection frees it."""

    def __init__(self, *held: object) -> None:
        self.held = (self, *held)


@pytest.mark.timeout(60)
def test_a_worker_leaves_the_garbage_of_its_parent_alone(rows: Path, tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", np.zeros((8, 64, 64, 3), np.uint8), [Fraction(i, 8) for i in range(8)])
    gc.disable()
    try:
        video = av.open(str(tmp_path / "a.mp4"))
        video.streams.video[0].thread_type = "AUTO"
        frames = video.decode(video=0)
        Cycle(video, frames, next(frames))    # garbage with threads, which are not forked
        del video, frames
        loader = Loader(make_job(rows, dataloader_num_workers=1), Collecting, dp_rank=0, dp_size=1)
        assert steps_of_epoch(loader)
    finally:
        gc.enable()


def count_call(path: Path) -> None:
    with path.open("a") as file:
        file.write("x")


def test_each_worker_is_initialised_first_and_outlives_sigterm(rows: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    job = make_job(rows, dataloader_num_workers=2)
    loader = make_loader(job, init_worker=partial(count_call, log))
    loader.next_step()
    seen = [loader.next_step() for _ in range(2)]
    workers = {worker.pid for feed in loader._feeds.values() for worker in feed._workers}  # type: ignore[attr-defined]
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    assert len(workers) == 2
    seen += steps_of_epoch(loader)
    assert log.read_text() == "xx"
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 10
    assert all(not Path(f"/proc/{pid}").exists() for pid in workers)


# Datasets of the user's own --------------------------------------------------------------------------


@register_dataset("test_map_dataset")
class MapDataset(BaseDataset):
    """Map style, with one bad row."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, idx: int) -> dict[str, Any]:
        if idx == 7:
            raise BadRow("broken", "row seven is broken")
        return text_row(f"m{idx}", 10 + idx % 20)


@register_dataset("test_stream_dataset")
class StreamDataset(BaseDataset):
    """A stream that does not know its length."""

    def __iter__(self) -> Any:
        yield from (text_row(f"s{i}") for i in range(30))


@register_dataset("test_broken_dataset")
class BrokenDataset(BaseDataset):
    """Fails at one index."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return {4: text_row("a"), 0: text_row("b")}[idx]


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("test_map_dataset", [f"m{i}" for i in range(40) if i != 7]),
        ("test_stream_dataset", [f"s{i}" for i in range(30)]),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_own_datasets_pack_shard_and_resume(name: str, ids: list[str], workers: int) -> None:
    job = make_job([], dataset_type=name, on_bad_row="skip", dataloader_num_workers=workers)
    before = [make_loader(job, rank, 2) for rank in (0, 1)]
    seen = [ids_of([loader.next_step() for _ in range(2)]) for loader in before]
    state = save(before)
    after = make_loader(job)
    after.load_state_dict(state)
    seen.append(ids_of(steps_of_epoch(after)))
    assert sorted(reduce(operator.iadd, seen, [])) == sorted(ids)
    after.next_epoch()
    second = ids_of(steps_of_epoch(after))
    assert sorted(second) == sorted(ids)
    assert second != reduce(operator.iadd, seen, [])
    for loader in (*before, after):
        loader.close()


def test_own_datasets_say_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"test_map_datase: unknown \(legal: vision_iterable, .*did you mean"):
        make_loader(make_job([], dataset_type="test_map_datase"))
    with pytest.raises(UserError, match=r"test_stream_dataset' has no `__len__`: set trainer_args.max_steps"):
        make_loader(make_job([], dataset_type="test_stream_dataset", num_train_epochs=1))
    with pytest.raises(UserError, match=r"source 'test_broken_dataset', shard 0, row [123] .*KeyError"):
        steps_of_epoch(make_loader(make_job([], dataset_type="test_broken_dataset")))
    with pytest.raises(UserError, match="registered already"):
        register_dataset("test_map_dataset")(MapDataset)
