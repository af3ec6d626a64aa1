"""Rows of metrics.jsonl: what they hold, how ranks combine, what a resume cuts off."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.errors import UserError
from lmms_engine.models.flops import Flops
from lmms_engine.segments import RowRef, Segments
from lmms_engine.train import metrics
from lmms_engine.train.metrics import (
    KEYS,
    PEAK_FLOPS,
    Recorder,
    StepClock,
    StepRecord,
    append_lines,
    batch_records,
    cut_back,
    make_row,
    peak_flops,
    read_lines,
    rows_file,
)
from lmms_engine.train.step import StepStats

CPU = torch.device("cpu")
SPEC_KEYS = [
    "step", "split", "loss", "loss_terms", "grad_norm", "lr", "supervised_tokens", "tokens", "samples",
    "skipped", "step_s", "data_s", "tokens_per_s", "mfu", "mfu_conventional", "peak_gb", "epoch",
    "source_loss",
]  # fmt: skip


def _batch(*rows: tuple[str, int, int], stand_in: int = 0) -> PackedBatch:
    """rows: (id, length, supervised positions); stand_in: length of a weight-0 segment behind them."""
    lengths = [length for _, length, _ in rows] + ([stand_in] if stand_in else [])
    weights = [w for _, length, n in rows for w in [1.0] * n + [0.0] * (length - n)] + [0.0] * stand_in
    return PackedBatch(
        segments=Segments.from_lengths(lengths),
        input_ids=torch.zeros(sum(lengths), dtype=torch.int64),
        position_ids=None,
        labels=None,
        loss_weights=torch.tensor(weights),
        rows=tuple(RowRef("src", 0, i, name) for i, (name, _, _) in enumerate(rows)),
    )


def _record(step: int, rank: int = 0, **changes) -> StepRecord:
    clock = StepClock(CPU)
    clock.stop()
    clock._end = clock._begin + 0.5 * (rank + 1)
    stats = StepStats({"ce": torch.tensor(3.0 + rank, dtype=torch.float64)}, {"ce": 7.0}, torch.tensor(1.25))
    record = StepRecord(
        step=step, epoch=0.5, stats=stats, lr={"decay": 1e-5}, clock=clock, data_s=0.125 * (rank + 1),
        micros=[_batch((f"r{rank}", 6 + rank, 3), stand_in=4)], flops=Flops(1e12, 2e12),
        skipped=[
            {"step": step, "id": f"bad{rank}", "kind": "media_missing"},
            {"step": step, "id": f"cut{rank}", "kind": "truncated"},   # seen: not refused
        ],
        peak_gb=1.0 + rank,
    )  # fmt: skip
    return replace(record, **changes)


def test_keys_are_those_of_the_specification():
    assert list(KEYS) == SPEC_KEYS
    assert list(make_row(step=1, split="eval")) == SPEC_KEYS


def _flush(folder: Path, rank: int, gather) -> list[dict]:
    mesh = SimpleNamespace(rank=rank, sp_rank=0, world_size=2, device=CPU, is_main=rank == 0, gather=gather)
    recorder = Recorder(folder, mesh, {"ce": 1.0}, log_rows=True)
    for step in (1, 2):
        recorder.add(_record(step, rank))
    rows = recorder.flush()
    assert not recorder.pending
    return rows


def test_two_ranks_give_one_row_per_step(tmp_path):
    sent: list = []
    _flush(tmp_path, 1, lambda entries: sent.append(entries) or [entries])  # what rank 1 contributes
    assert not (tmp_path / "metrics.jsonl").exists()
    rows = _flush(tmp_path, 0, lambda entries: [entries, sent[0]])
    assert rows == read_lines(tmp_path / "metrics.jsonl")
    row = rows[1]
    assert list(row) == SPEC_KEYS
    assert (row["step"], row["split"]) == (2, "train")
    assert row["loss"] == row["loss_terms"]["ce"] == (3.0 + 4.0) / 7.0
    assert row["tokens"] == 6 + 7  # the stand-ins' 4 + 4 are no tokens
    assert row["supervised_tokens"] == 3 + 3
    assert row["samples"] == 2
    assert row["skipped"] == 2
    assert row["step_s"] == pytest.approx(1.0)  # the slower rank
    assert row["data_s"] == 0.25
    assert row["tokens_per_s"] == row["tokens"] / row["step_s"]
    assert row["mfu"] is None  # no peak is known for a CPU
    assert row["peak_gb"] == 2.0
    skipped = read_lines(tmp_path / "skipped.jsonl")
    assert [line["step"] for line in skipped] == [1] * 4 + [2] * 4
    assert [line["id"] for line in skipped] == ["bad0", "cut0", "bad1", "cut1"] * 2
    for rank in range(2):
        logged = read_lines(tmp_path / rows_file(rank))
        assert [(line["step"], line["micro"]) for line in logged] == [(1, 0), (2, 0)]
        assert {line["tokens"] for line in logged} == {6 + rank}
        assert logged[0]["rows"][0]["id"] == f"r{rank}"


def test_parts_of_the_loss_by_source_are_no_terms_of_it(tmp_path):
    mesh = SimpleNamespace(rank=0, sp_rank=0, world_size=1, device=CPU, is_main=True, gather=lambda v: [v])
    sums = {"ce": 6.0, "source/a": 4.0, "source/b": 2.0, "source/c": 0.0}
    totals = {"ce": 4.0, "source/a": 1.0, "source/b": 3.0, "source/c": 0.0}
    stats = StepStats({term: torch.tensor(value) for term, value in sums.items()}, totals, torch.tensor(1.0))
    recorder = Recorder(tmp_path, mesh, dict.fromkeys(sums, 0.0) | {"ce": 1.0})
    recorder.add(_record(1, stats=stats))
    (row,) = recorder.flush()
    assert row["loss"] == 1.5
    assert row["loss_terms"] == {"ce": 1.5}
    assert row["source_loss"] == {"a": 4.0, "b": pytest.approx(2 / 3), "c": None}
    recorder = Recorder(tmp_path, mesh, {"ce": 1.0})
    recorder.add(_record(1))
    assert recorder.flush()[0]["source_loss"] is None   # one source


def test_mfu_is_flops_over_peak_devices_and_whole_time(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "peak_flops", lambda device: 4e12)
    mesh = SimpleNamespace(rank=0, sp_rank=0, world_size=2, device=CPU, is_main=True)
    mesh.gather = lambda value: [value, value]
    recorder = Recorder(tmp_path, mesh, {"ce": 1.0})
    recorder.add(_record(1))
    (row,) = recorder.flush()
    assert row["mfu"] == pytest.approx(2 * 1e12 / (4e12 * 2 * 0.5))
    assert row["mfu_conventional"] == pytest.approx(2 * row["mfu"])


def test_full_precision_survives_the_file(tmp_path):
    loss = 2.0 / 3.0 + 1e-15
    append_lines(tmp_path / "metrics.jsonl", [make_row(step=1, split="train", loss=loss)])
    assert read_lines(tmp_path / "metrics.jsonl")[0]["loss"] == loss


def test_numbers_that_are_none_become_null(tmp_path):
    nan, infinity = float("nan"), float("inf")
    append_lines(tmp_path / "m.jsonl", [{"loss": nan, "terms": {"ce": infinity}, "l": [1.0, nan]}])
    assert (tmp_path / "m.jsonl").read_text() == '{"loss": null, "terms": {"ce": null}, "l": [1.0, null]}\n'


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA L40S", 362.05e12), ("NVIDIA L40", 181.05e12), ("NVIDIA L400", None)]
)
def test_devices_are_matched_by_their_whole_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak
    assert peak_flops(CPU) is None
    assert PEAK_FLOPS["NVIDIA H200"] == PEAK_FLOPS["NVIDIA H100 80GB HBM3"] == 989.4e12


def test_batch_records_leave_stand_ins_out_of_rows_and_tokens():
    (record,) = batch_records(7, [_batch(("a", 5, 2), ("b", 3, 0), stand_in=4)])
    assert record["cu_seqlens"] == [0, 5, 8, 12]
    assert record["tokens"] == 8
    assert record["rows"] == [
        {"source": "src", "shard": 0, "row": 0, "id": "a", "length": 5, "supervised": 2},
        {"source": "src", "shard": 0, "row": 1, "id": "b", "length": 3, "supervised": 0},
    ]


def test_odd_letters_of_ids_and_file_names_are_kept(tmp_path):
    rows = [{"step": step, "id": "a\u2028b\x85c", "source": "d\udc80"} for step in (1, 2)]
    append_lines(tmp_path / "rows-0.jsonl", rows)
    assert read_lines(tmp_path / "rows-0.jsonl") == rows
    cut_back(tmp_path, 1)
    assert read_lines(tmp_path / "rows-0.jsonl") == rows[:1]
    assert read_lines(tmp_path / "rows-0.jsonl.discarded") == rows[1:]


@pytest.mark.parametrize("line", [b"5", b"null", b"[]", b'{"x": 1}', b'{"step": "\xff"}'])
def test_damaged_lines_are_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged \(.*line 2.*: put a copy of it back"):
        read_lines(path, ("step",))


def test_cut_back_moves_damaged_lines(tmp_path):
    good = b'{"step": 1}\n'
    damaged = [b"5\n", b"[]\n", b'{"step": "x"}\n', b'{"step": 1, "a": "\xff"}\n', b"\x00\xff\n"]
    (tmp_path / "metrics.jsonl").write_bytes(good + b"".join(damaged) + good)
    assert cut_back(tmp_path, 2) == len(damaged)
    assert (tmp_path / "metrics.jsonl").read_bytes() == good + good
    assert (tmp_path / "metrics.jsonl.discarded").read_bytes() == b"".join(damaged)


def test_cut_back_moves_later_rows_and_torn_lines(tmp_path):
    for name in ("metrics.jsonl", "rows-0.jsonl", "rows-1.jsonl", "skipped.jsonl", "other.jsonl"):
        (tmp_path / name).write_text(
            "".join(json.dumps({"step": s, "of": name}) + "\n" for s in (1, 2, 3, 4))
        )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert cut_back(tmp_path, 2) == 3
    for name in ("metrics.jsonl", "rows-0.jsonl", "rows-1.jsonl", "skipped.jsonl"):
        assert [row["step"] for row in read_lines(tmp_path / name)] == [1, 2]
        assert [row["step"] for row in read_lines(tmp_path / f"{name}.discarded")] == [3, 4]
    assert '{"step": 5, "lo\n' in (tmp_path / "metrics.jsonl.discarded").read_text()
    assert len(read_lines(tmp_path / "other.jsonl")) == 4
    assert cut_back(tmp_path, 2) == 0
