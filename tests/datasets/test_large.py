"""JSONL too large to be read before it starts: every row lies in one slot and comes once an epoch."""

from __future__ import annotations

import json
import os
import pickle
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmms_engine.config import DatasetEntry
from lmms_engine.datasets import order as order_module
from lmms_engine.datasets.loader import merge_states
from lmms_engine.datasets.order import Order, OrderSettings
from lmms_engine.datasets.sources import open_source, text
from lmms_engine.datasets.sources.files import LocalFile
from lmms_engine.errors import BadRow, UserError
from tests.datasets.test_sources import ODD, odd_file
from tests.datasets.toy_data import ids_of, make_job, make_loader, steps_of_epoch, text_row, write_jsonl


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every JSONL file counts as large."""
    monkeypatch.setattr(text, "NUMBERED_BYTES", 0)


def lines_file(folder: Path, count: int = 300) -> Path:
    """Lines of very different lengths."""
    rng = random.Random(5)
    lengths = [int(min(max(rng.lognormvariate(2.8, 0.8), 6), 60)) for _ in range(count)]
    return write_jsonl(folder / "rows.jsonl", [text_row(f"r{i}", n) for i, n in enumerate(lengths)])


LINE = st.sampled_from([b"", b"\r", b"{}", b'{"a": 1}', b'{"a": "' + b"x" * 90 + b'"}', b"\xff{", b"[" * 70])


@settings(max_examples=150, deadline=None)
@given(st.lists(LINE, min_size=1, max_size=12), st.booleans(), st.integers(1, 40), st.data())
def test_every_line_lies_in_the_slot_of_its_first_byte(
    lines: list[bytes], ended: bool, slot_bytes: int, data: st.DataObject
) -> None:
    content = b"\n".join(lines) + (b"\n" if ended else b"")
    if not content:
        return
    starts = [at for at in range(len(content)) if at == 0 or content[at - 1 : at] == b"\n"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(content)
        source = text.SlottedLines([LocalFile(str(path))])
        source.slot_bytes = slot_bytes
        source._counts = [-(-len(content) // slot_bytes)]
        first = data.draw(st.integers(0, source.num_rows - 1))
        stop = data.draw(st.integers(first + 1, source.num_rows))
        got = dict(source.slots(0, first, stop))
        assert list(got) == list(range(first, stop))
        for slot, rows in got.items():
            assert [at for at, _ in rows] == [at for at in starts if at // slot_bytes == slot]
            for at, raw in rows:
                line = content[at:].split(b"\n")[0]
                again = source.read(0, at)
                assert (raw is None) == (again is None) == (not line.strip())
                if isinstance(raw, BadRow):
                    assert f"a.jsonl, line at byte {at}" in str(raw)
                    assert str(again) == str(raw)
                else:
                    assert again == raw == (json.loads(line) if line.strip() else None)
        assert [at for at, _ in source.rows(0, starts[-1])] == starts[-1:]
        if len(starts) < len(content):
            inside = data.draw(st.sampled_from([at for at in range(len(content)) if at not in starts]))
            with pytest.raises(IndexError, match=f"no line begins at byte {inside}"):
                source.read(0, inside)


@pytest.mark.usefixtures("large")
def test_weights_are_of_rows_also_where_slots_are_dealt(tmp_path: Path) -> None:
    lengths = random.Random(2).choices(range(20, 60), k=800)
    rows = [[text_row(f"{name}{i}", n) for i, n in enumerate(lengths)] for name in "ab"]
    write_jsonl(tmp_path / "a.jsonl", rows[0])
    (tmp_path / "b.json").write_text(json.dumps(rows[1]))
    entries = [{"path": str(tmp_path / name), "weight": 0.5} for name in ("a.jsonl", "b.json")]
    for stop in ("first", "all"):
        ids = ids_of(steps_of_epoch(make_loader(make_job(entries, mixture_stop=stop))))
        share = sum(i.startswith("a") for i in ids) / len(ids)
        assert abs(share - 0.5) < 0.06, (stop, share)   # by slots it would be 0.37


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_comes_once_an_epoch_in_new_orders(tmp_path: Path, workers: int) -> None:
    path = lines_file(tmp_path)
    assert open_source(DatasetEntry(path=str(path)), by_line=False).slotted
    orders = []
    for ranks in (1, 2):
        job = make_job(path, dataloader_num_workers=workers)
        loaders = [make_loader(job, rank, ranks) for rank in range(ranks)]
        for _ in range(2):
            seen = [ids_of(steps_of_epoch(loader)) for loader in loaders]
            orders.append([i for ids in seen for i in ids])
            assert sorted(orders[-1]) == sorted(f"r{i}" for i in range(300))
            assert all(len(ids) > 300 // ranks // 2 for ids in seen)
            for loader in loaders:
                loader.next_epoch()
        for loader in loaders:
            loader.close()
    assert orders[0] != orders[1]
    neighbours = sum(b == f"r{int(a[1:]) + 1}" for a, b in zip(orders[0], orders[0][1:], strict=False))
    assert neighbours < 60   # of 299: as good as shuffled


@pytest.mark.usefixtures("large")
def test_resume_at_every_step_with_other_ranks(tmp_path: Path) -> None:
    path = lines_file(tmp_path, 80)
    whole = len(steps_of_epoch(make_loader(make_job(path))))
    for steps in range(0, whole, 3):
        first = make_loader(make_job(path))
        seen = ids_of([first.next_step() for _ in range(steps)])
        state = json.loads(json.dumps(merge_states([first.state_dict()])))
        for rank in (0, 1):
            second = make_loader(make_job(path), rank, 2)
            second.load_state_dict(state)
            seen += ids_of(steps_of_epoch(second))
        assert sorted(seen) == sorted(f"r{i}" for i in range(80))


@pytest.mark.usefixtures("large")
def test_progress_runs_from_0_to_1_also_where_rows_are_not_counted(tmp_path: Path) -> None:
    rows = [text_row(f"r{i}", 1000 if i % 5 == 4 else 6) for i in range(200)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    source = open_source(DatasetEntry(path=str(path)), by_line=False)
    assert max(len(rows) for _, rows in source.slots(0, 0, source.num_rows)) > 1
    loader = make_loader(make_job(path, num_logical_shards=1, packing_length=1500, shuffle=False))
    seen = [loader.progress()]
    while loader.next_step():
        seen.append(loader.progress())
    assert seen == sorted(seen)
    assert (seen[0], loader.progress()) == (0.0, 1.0)


@pytest.mark.usefixtures("large")
def test_odd_lines_are_kept_and_bad_ones_named_by_their_byte(tmp_path: Path) -> None:
    path = odd_file(tmp_path)
    source = open_source(DatasetEntry(path=str(path)), by_line=False)
    rows = [raw for _, raw in source.rows(0)]
    bad = [None if raw is None else isinstance(raw, BadRow) for raw in rows]
    assert bad == [False, False, None, False, True]
    assert rows[1]["messages"][0]["content"] == ODD
    loader = make_loader(make_job(path, on_bad_row="skip"), stand_in=False)
    assert sorted(ids_of(steps_of_epoch(loader))) == ["first", "second", "三"]
    (skipped,) = loader.take_skipped()
    assert path.read_bytes()[skipped.row :].startswith(b'{"id": "\xe4\xb8\x89"')
    assert f"line at byte {skipped.row} (the last one: the file may be cut off)" in skipped.reason
    with pytest.raises(UserError, match=rf"row {skipped.row} .*line at byte {skipped.row}"):
        steps_of_epoch(make_loader(make_job(path), stand_in=False))


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_a_file_cut_while_it_is_read_is_no_end_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(text, "NUMBERED_BYTES", most)
    path = lines_file(tmp_path)
    source = open_source(DatasetEntry(path=str(path)), by_line=False)
    assert source.slotted == (most == 0)
    total = path.stat().st_size
    whole = [at for at, _ in source.rows(0)]
    os.truncate(path, total // 2)
    for each in (source, pickle.loads(pickle.dumps(source))):
        rows = list(each.rows(0))
        assert [at for at, _ in rows[:-1]] == whole[: len(rows) - 1]
        assert "rows.jsonl, line" in str(rows[-1][1])
        assert "shorter since the run began and ends before this row" in str(rows[-1][1])
    if source.slotted:
        for slot in range(total // 2 // source.slot_bytes + 2, source.num_rows):
            ((number, ((at, raw),)),) = source.slots(0, slot, slot + 1)
            assert (number, at, type(raw)) == (slot, slot * source.slot_bytes, BadRow)


@pytest.mark.usefixtures("large")
def test_only_what_a_limit_needs_is_numbered_and_data_prep_sees_lines(tmp_path: Path) -> None:
    path = lines_file(tmp_path)
    cut = open_source(DatasetEntry(path=str(path), limit=7), by_line=False)
    assert (cut.slotted, cut.num_rows) == (False, 7)
    assert [raw["id"] for _, raw in cut.rows(0)] == [f"r{i}" for i in range(7)]
    assert open_source(DatasetEntry(path=str(path))).place(0, 6).endswith("rows.jsonl, line 7")
    again = pickle.loads(pickle.dumps(open_source(DatasetEntry(path=str(path)), by_line=False)))
    assert [raw["id"] for _, raw in again.rows(0)] == [f"r{i}" for i in range(300)]


def test_the_order_of_very_many_rows_stays_small() -> None:
    class Rows:
        num_rows, num_shards, row_bytes = 3 * 10**9, 3, 100

        def shard_rows(self, shard: int) -> int:
            return 10**9

    order = Order([Rows()], OrderSettings(1, 32, True, (1.0,), "all"), 0)  # type: ignore[list-item]
    assert len(order._pools[0]._slices) <= order_module.MAX_SLICES + 3
    window, _ = order.window_of(31, 10**7)
    assert len(set(window)) == order_module.WINDOW_ROWS
    assert sum(order.shard_rows(shard) for shard in range(32)) == 3 * 10**9
