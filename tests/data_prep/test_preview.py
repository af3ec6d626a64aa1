"""`data-prep preview`: what stands on the page, and that nothing in a row gets out of its place."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from pathlib import Path

from PIL import Image
from typer.testing import CliRunner, Result

from data_prep.cli import app

runner = CliRunner()


def run(*arguments: object) -> Result:
    return runner.invoke(app, ["preview", *map(str, arguments)])


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(*content: dict, answer: str = "red") -> dict:
    return {
        "messages": [{"role": "user", "content": list(content)}, {"role": "assistant", "content": answer}]
    }


def text(value: str) -> dict:
    return {"type": "text", "text": value}


def test_the_page_needs_nothing_from_outside(sample: Path, tmp_path: Path) -> None:
    result = run(sample / "heldout.jsonl", "--rows", 8, "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.html").read_text()
    assert page.count("<article>") == 8
    sources = re.findall(r"(?:src|href)=\"([^\"]*)", page)
    assert sources
    assert all(source.startswith("data:") for source in sources)
    assert "<script" not in page
    assert not list(tmp_path.glob("*.partial"))


def test_media_are_shown_small_and_faults_in_their_place(sample: Path, tmp_path: Path) -> None:
    Image.new("RGB", (1000, 500), "red").save(tmp_path / "red.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "red.png").read_bytes()[:300])
    clip = sorted((sample / "videos").glob("*.mp4"))[0]
    sound = sorted((sample / "audio").glob("*.wav"))[0]
    path = write(
        tmp_path / "rows.jsonl",
        chat({"type": "image", "image": "red.png"}, text("a")),
        chat({"type": "image", "image": "cut.png"}, text("b")),
        chat({"type": "video", "video": str(clip)}, {"type": "audio", "audio": str(sound)}),
        {"id": "no turns"},
    )
    assert run(path, "--out", tmp_path / "page.html").exit_code == 0
    first, second, third, fourth = (tmp_path / "page.html").read_text().split("<article>")[1:]
    data = re.search(r"data:image/jpeg;base64,([^\"]+)", first)[1]
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert image.size == (320, 160)
        red, green, blue = image.getpixel((100, 100))
        assert red > 240 > 20 > max(green, blue)
    assert "1000 × 500" in first
    assert "media_corrupt" in second
    assert "<img" not in second
    assert ">b<" in second   # the rest of the row is there
    assert (third.count("<img"), third.count("<audio")) == (4, 1)
    assert base64.b64encode(sound.read_bytes()).decode() in third
    assert 'class="fault">messages: ' in fourth


def test_supervised_tokens_are_coloured_and_no_other(sample: Path, tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    path = write(tmp_path / "rows.jsonl", chat({"type": "image", "image": "red.png"}, text("a circle")))
    result = run(path, "--processor", sample / "processor" / "qwen3_vl", "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.html").read_text().split("<article>")[1]
    assert [html.unescape(mark) for mark in re.findall(r"<mark>(.*?)</mark>", page)] == ["red<|im_end|>"]
    shown = html.unescape(re.sub(r"<[^>]+>", "", page.split("<pre>")[1].split("</pre>")[0]))
    assert "<|vision_start|><|image_pad|> × 4<|vision_end|>a circle<|im_end|>" in shown


def test_markup_in_a_row_stays_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=y>"
    row = {"id": evil, **chat(text(evil), answer=evil)}
    row["messages"][1]["tool_calls"] = [{"name": "f", "arguments": {"a": evil}}]
    bad = {"id": "b", "messages": [{"role": evil, "content": "a"}]}
    assert run(write(tmp_path / "rows.jsonl", row, bad), "--out", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;") >= 4


def test_start_and_rows_choose(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *(chat(text(f"row number {n}")) for n in range(100)))
    run(path, "--start", 70, "--rows", 2, "--out", tmp_path / "page.html")
    found = re.findall(r"row number (\d+)", (tmp_path / "page.html").read_text())
    assert found == ["70", "71"]
