"""report.html from rows: self-contained, escaped, drawn from the numbers of the run."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from lmms_engine.errors import UserError
from lmms_engine.segments import RowRef
from lmms_engine.train.metrics import make_row
from lmms_engine.train.report import MAX_POINTS, curve, render, summary, write_report
from lmms_engine.train.samples import Shown


def _train(step: int, **values) -> dict:
    base = {
        "loss": 5.0 - step, "grad_norm": 1.0, "lr": {"decay": 0.1 * step, "no_decay": 0.1 * step},
        "tokens": 100, "supervised_tokens": 10, "samples": 2, "skipped": 1, "step_s": 2.0, "data_s": 0.1,
        "tokens_per_s": 50.0, "peak_gb": 0.5 * step, "epoch": step / 4,
    }  # fmt: skip
    return make_row(step=step, split="train", **{**base, **values})


TRAIN = [_train(step) for step in (1, 2, 3)]
EVAL = [make_row(step=2, split="eval", loss=2.5, supervised_tokens=20)]
SAMPLE = Shown(
    RowRef("data/a.jsonl", 0, 3, "<id>"), [("user: 1 < 2?\n", False), ("yes & no", True)], ["QUJD"]
)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action") and not value.startswith(("data:", "#")):
                self.outside.append(value)


def _page(**changes) -> str:
    values = {
        "rows": [*TRAIN, *EVAL],
        "config": {"trainer_args": {"seed": 7}},
        "manifest": {"seed": 7, "packages": {}},
        "samples": [SAMPLE],
    }
    return render("my <run>", **{**values, **changes})


def test_the_page_refers_to_nothing_outside_itself():
    page = _page()
    links = _Links()
    links.feed(page)
    assert links.outside == []
    assert not {"script", "link", "iframe", "object"} & set(links.tags)
    assert "@import" not in page
    assert "url(http" not in page


def test_texts_are_escaped_and_supervised_text_is_marked():
    page = _page()
    assert "my &lt;run&gt;" in page
    assert "user: 1 &lt; 2?" in page
    assert "<mark>yes &amp; no</mark>" in page
    assert "&lt;id&gt;" in page
    assert 'src="data:image/jpeg;base64,QUJD"' in page
    assert "<td>trainer_args.seed</td><td>7</td>" in page


def test_summary_adds_up():
    facts = summary(TRAIN, EVAL)
    assert facts["tokens"] == "300"
    assert facts["samples"] == "6"
    assert facts["rows skipped"] == "3"
    assert facts["tokens per second"] == "50"
    assert facts["held-out loss"] == "2.5000"
    assert facts["loss, first and last step"] == "4.0000, 2.0000"
    assert facts["MFU (strict)"] == "unknown device"
    assert facts["peak memory"] == "1.50 GB"
    rated = [
        _train(step, mfu=0.2 * step, mfu_conventional=0.4 * step, step_s=2.0 * step - 1) for step in (1, 2)
    ]
    assert summary(rated, [])["MFU (strict)"] == "35.0%"  # weighted by time
    assert summary(rated, [])["held-out loss"] == "not measured"


def _path_lengths(svg: str) -> list[int]:
    root = ElementTree.fromstring(svg)
    paths = [node.get("d") for node in root.iter("{http://www.w3.org/2000/svg}path")]
    return [len(re.findall(r"[ML]", d)) for d in paths if d]


def test_curves_are_drawn_from_all_points_or_thinned():
    assert "held out" in curve("loss", "Loss", TRAIN, EVAL)
    many = [_train(step) for step in range(1, 4 * MAX_POINTS)]
    svg = curve("loss", "Loss", many, [])
    assert len(svg) < 300_000
    assert "does not apply" in curve("mfu", "MFU", TRAIN, [])
    assert "no_decay" not in curve("lr", "Learning rate", TRAIN, [])  # one line: equal in all groups
    two = [_train(step, lr={"a": 1.0, "b": 2.0}) for step in (1, 2)]
    assert ">b<" in curve("lr", "Learning rate", two, [])
    zigzag = [_train(step, grad_norm=float(step % 7)) for step in range(1, 41)]
    assert max(_path_lengths(curve("grad_norm", "Norm", zigzag, []))) >= 40


def test_missing_samples_are_explained():
    page = _page(samples=[], samples_missing="not available: dataset 'x' does not exist")
    assert html.escape("not available: dataset 'x' does not exist") in page


def test_a_folder_without_steps_is_refused(tmp_path):
    with pytest.raises(UserError, match="is this a run folder"):
        write_report(tmp_path)
