"""Rows to samples, both families: ids and pixels are the library's, slots match features, limits hold."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.video_utils import VideoMetadata

from data_prep.clips import encoder, write_clip
from lmms_engine.datasets.loader import Loader
from lmms_engine.datasets.processor.pixels import tower_kwargs
from lmms_engine.datasets.processor.vision_language import Slots, mrope_positions
from lmms_engine.datasets.sample import Sample
from lmms_engine.datasets.schema import MediaPart, parse_row
from lmms_engine.datasets.video import load_clip
from lmms_engine.errors import BadRow, UserError
from lmms_engine.segments import RowRef
from tests.datasets.toy_data import make_job, steps_of_epoch, write_jsonl

Build = Callable[..., Any]
Make = Callable[..., Sample]


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)


def picture(folder: Path, width: int, height: int, name: str = "p.png") -> dict[str, str]:
    pixels = noise(height, width, 3) if width < 1000 else np.zeros((height, width, 3), np.uint8)
    Image.fromarray(pixels).save(folder / name)
    return {"type": "image", "path": name}


def frames(folder: Path, count: int, size: int = 128, fps: float = 2.0) -> dict[str, Any]:
    folder = folder / f"frames{count}"
    folder.mkdir()
    for i in range(count):
        Image.fromarray(noise(size, size, 3, seed=i)).save(folder / f"{i:03}.png")
    return {"type": "video", "path": folder.name, "fps": fps}


def clip(folder: Path, seconds: int = 4, rate: int = 8, size: tuple[int, int] = (64, 96)) -> dict[str, str]:
    times = [Fraction(i, rate) for i in range(seconds * rate)]
    write_clip(folder / "c.mp4", [noise(*size, 3, seed=i) for i in range(len(times))], times)
    return {"type": "video", "path": "c.mp4"}


def pixel_values(processor: Any, media: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the model gets, float32."""
    return tower_kwargs(media, processor.tower_inputs(media))["pixel_values"]


def check_slots(processor: Any, of: Sample) -> None:
    """Slots = features = pixel rows / merge², and nothing is learnt at a slot."""
    slots = (of.input_ids == processor.image_token) | (of.input_ids == processor.video_token)
    grids = of.media["image_grid_thw"]
    assert slots.sum() * processor.merge**2 == grids.prod(1).sum() == len(of.media["pixel_bytes"])
    targets = of.labels[of.labels != -100]
    assert not torch.isin(targets, torch.tensor([processor.image_token, processor.video_token])).any()


def test_ids_and_pixels_are_the_librarys(
    build: Build, library: Any, sample: Make, tmp_path: Path
) -> None:
    processor = build()
    first, film, second = picture(tmp_path, 150, 100), clip(tmp_path), picture(tmp_path, 64, 90, "q.png")
    content = [first, {"type": "text", "text": "Then"}, film, second, {"type": "text", "text": "what?"}]
    ours = sample(processor, content, "A cat", "Sure?", " yes ")

    decoded = load_clip(
        MediaPart(kind="video", path=str(tmp_path / "c.mp4")), fps=2.0, min_frames=4, max_frames=768
    )
    settings = processor.videos.to_dict()
    messages = [
        {"role": "user", "content": [{"type": part["type"], "text": part.get("text")} for part in content]},
        {"role": "assistant", "content": "A cat"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": " yes "},
    ]
    theirs = library(
        text=library.apply_chat_template(messages, tokenize=False),
        images=[Image.open(tmp_path / part["path"]) for part in (first, second)],
        videos=[torch.from_numpy(decoded.frames).permute(0, 3, 1, 2)],
        video_metadata=[VideoMetadata(32, fps=8.0, frames_indices=(decoded.times * 8).round().tolist())],
        do_sample_frames=False,
        videos_kwargs={k: settings[k] for k in ("size", "cap_pixels_per_frame", "max_video_tokens")},
        return_tensors="pt",
    )
    assert ours.input_ids.tolist() == theirs["input_ids"][0].tolist()
    grids = [*theirs["image_grid_thw"].tolist()[:1], *theirs["video_grid_thw"].tolist()]
    grids += theirs["image_grid_thw"].tolist()[1:]
    assert ours.media["image_grid_thw"].tolist() == grids
    cut = int(theirs["image_grid_thw"][0].prod())
    pixels = [theirs["pixel_values"][:cut], theirs["pixel_values_videos"], theirs["pixel_values"][cut:]]
    torch.testing.assert_close(pixel_values(processor, ours.media), torch.cat(pixels), rtol=0, atol=0)

    decode = processor.tokenizer.decode
    assert decode(ours.labels[ours.labels != -100]) == "A cat<|im_end|> yes <|im_end|>"
    check_slots(processor, ours)


def test_labels_are_shifted_inside_the_sample(build: Build, sample: Make) -> None:
    of = sample(build(), [{"type": "text", "text": "q"}], "red")
    supervised = of.labels != -100
    assert torch.equal(of.loss_weights, supervised.float())
    assert of.loss_weights.dtype == torch.float32
    at = supervised.nonzero().flatten()
    assert torch.equal(of.labels[at], of.input_ids[at + 1])
    assert of.labels[-1] == -100
    assert of.supervised == len(at) == 2
    assert torch.equal(of.position_ids, torch.arange(len(of)).expand(3, -1))
    assert of.media == {}


def test_a_picture_in_the_answer_is_not_learnt(build: Build, tmp_path: Path) -> None:
    processor = build()
    turns = [
        {"role": "user", "content": "draw"},
        {"role": "assistant", "content": [{"type": "text", "text": "so:"}, picture(tmp_path, 64, 64)]},
    ]
    of = processor(parse_row({"messages": turns}, tmp_path), RowRef("test", 0, 0, "row"))
    assert processor.tokenizer.decode(of.labels[of.labels != -100]) == "so:<|im_end|>"
    check_slots(processor, of)


def test_templates_that_reorder_media_are_noticed(build: Build, sample: Make, tmp_path: Path) -> None:
    processor = build()
    processor.chat.template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}<|video_pad|><|image_pad|>{% endif %}"
        "<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(BadRow) as caught:
        sample(processor, [picture(tmp_path, 64, 64), clip(tmp_path)], "a")
    assert caught.value.kind == "media_order"


def file_of_frames(folder: Path, count: int) -> dict[str, str]:
    """Also of a single one, which `write_clip` refuses."""
    with av.open(str(folder / "n.mp4"), "w") as container:
        stream = container.add_stream(encoder(), rate=8)
        stream.width, stream.height, stream.pix_fmt = 128, 128, "yuv420p"
        for i in range(count):
            frame = av.VideoFrame.from_ndarray(noise(128, 128, 3, seed=i), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return {"type": "video", "path": "n.mp4"}


@pytest.mark.parametrize("form", ["pictures", "file"])
@pytest.mark.parametrize(("count", "groups"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (7, 4), (8, 4)])
def test_odd_frame_counts(
    build: Build, sample: Make, tmp_path: Path, count: int, groups: int, form: str
) -> None:
    """Clips of 128 x 128 of which every frame is used; one frame is repeated."""
    processor = build(fps=8.0)
    part = frames(tmp_path, count)
    if form == "file":
        part = file_of_frames(tmp_path, count)
    of = sample(processor, [part], "a")
    cells = {14: 10, 16: 8}[processor.patch]   # 140 is nearer to 128 than 112 is
    assert of.media["image_grid_thw"].tolist() == [[groups, cells, cells]]
    assert int((of.input_ids == processor.video_token).sum()) == groups * cells**2 // processor.merge**2
    check_slots(processor, of)
    # The last group is filled with the last frame: its two halves hold the same pixels.
    patches = pixel_values(processor, of.media).view(groups, -1, 3, 2, processor.patch, processor.patch)
    alike = (patches[:, :, :, 0] == patches[:, :, :, 1]).flatten(1).all(1)
    assert alike.tolist() == [False] * (groups - count % 2) + [True] * (count % 2)


def test_odd_clips_equal_the_librarys(build: Build, library: Any, sample: Make, tmp_path: Path) -> None:
    processor = build()
    of = sample(processor, [frames(tmp_path, 5, size=100)], "a")
    stacked = torch.from_numpy(np.stack([noise(100, 100, 3, seed=i) for i in range(5)])).permute(0, 3, 1, 2)
    settings = processor.videos.to_dict()
    theirs = library.video_processor(
        videos=[stacked],
        do_sample_frames=False,
        **{k: settings[k] for k in ("size", "cap_pixels_per_frame", "max_video_tokens")},
        return_tensors="pt",
    )
    ours = pixel_values(processor, of.media)
    torch.testing.assert_close(ours, theirs["pixel_values_videos"], rtol=0, atol=0)


def test_video_max_pixels_bounds_a_frame(build: Build, sample: Make, tmp_path: Path) -> None:
    part = frames(tmp_path, 4, size=256)
    for limit in (200 * 200, 100 * 100, 64 * 64):
        processor = build(video_max_pixels=limit)
        _, h, w = sample(processor, [part], "a").media["image_grid_thw"][0].tolist()
        assert h * w * processor.patch**2 <= limit
    assert h * w * processor.patch**2 > 28 * 28   # it shrinks no further than it must


def test_video_max_frames_bounds_a_clip(build: Build, sample: Make, tmp_path: Path) -> None:
    of = sample(build(fps=8.0, video_max_frames=6), [clip(tmp_path)], "a")
    assert of.media["image_grid_thw"][0, 0] == 3


def test_stand_in_is_the_smallest_picture_without_weight(build: Build) -> None:
    processor = build()
    of = processor.stand_in()
    assert of.row.source == "stand-in"
    assert of.supervised == 0
    assert (of.labels == -100).all()
    assert of.media["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert not of.media["pixel_bytes"].any()
    assert pixel_values(processor, of.media).shape == (4, 3 * 2 * processor.patch**2)
    check_slots(processor, of)


def test_sound_is_refused_clearly(build: Build, sample: Make) -> None:
    with pytest.raises(BadRow, match="takes no sound") as caught:
        sample(build(), [{"type": "audio", "path": "a.wav"}], "a")
    assert caught.value.kind == "unsupported_media"


def test_missing_pictures_are_named(build: Build, sample: Make) -> None:
    with pytest.raises(BadRow, match=r"nowhere\.png") as caught:
        sample(build(), [{"type": "image", "path": "nowhere.png"}], "a")
    assert caught.value.kind == "media_missing"


def test_truncation_drops_whole_turns_with_their_media(build: Build, tmp_path: Path) -> None:
    look, small = {"type": "text", "text": "look "}, picture(tmp_path, 64, 64)
    large, ask = picture(tmp_path, 128, 128, "q.png"), {"type": "text", "text": "and"}
    turns = [
        {"role": "user", "content": [look, small]},
        {"role": "assistant", "content": "a long answer"},
        {"role": "user", "content": [look, large, ask]},
        {"role": "assistant", "content": "another"},
    ]

    def sample(of: Any, count: int = 4) -> Any:
        return of(parse_row({"messages": turns[:count]}, tmp_path), RowRef("test", 0, 0, "row"))

    whole, first = sample(build()), sample(build(), 2)
    end = len(first) - 1   # the end marker; a line break follows
    slots = (whole.input_ids == build().image_token).nonzero().flatten()
    last = int(slots[-1])
    for limit in (end, end + 1, last, last + 3, len(whole) - 1, len(whole), len(whole) + 1):
        processor = build(max_length=limit, overlong="truncate")
        of = sample(processor)
        kept = len(whole) if limit >= len(whole) else end if limit < len(whole) - 1 else len(whole) - 1
        assert len(of) == kept
        assert of.truncated == (kept < len(whole))
        assert torch.equal(of.input_ids, whole.input_ids[:kept])
        assert torch.equal(of.position_ids, whole.position_ids[:, :kept])
        assert of.labels[-1] == -100
        assert len(of.media["image_grid_thw"]) == (1 if kept == end else 2)
        assert of.supervised == (first.supervised if kept == end else whole.supervised)
        check_slots(processor, of)
    for limit in (1, int(slots[0]) + 1, end - 1):
        with pytest.raises(BadRow, match="its first question and answer are") as bad:
            sample(build(max_length=limit, overlong="truncate"))
        assert bad.value.kind == "overlong"
    assert len(sample(build(max_length=8, overlong="drop"))) == len(whole)


@pytest.mark.parametrize("place", [0, 3, 5])
@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_the_limit_never_separates_slots_and_features(
    build: Build, tmp_path: Path, overlong: str, place: int
) -> None:
    """Rows of limit - 1, limit and limit + 1 tokens, the latter first, in the middle or last; pictures
    longer than the limit, and across it."""
    limit, measure = 48, build()
    unit = measure.patch * measure.merge

    def row(id_: str, words: int, *middle: Any, after: str = "so?") -> dict[str, Any]:
        text = [{"type": "text", "text": "a " * words}, *middle, {"type": "text", "text": after}]
        roles = ("user", "assistant", "user", "assistant")
        turns = ("Hi", "ok", text, "yes")
        return {"id": id_, "messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]}

    def tokens(of: dict[str, Any]) -> list[int]:
        return measure(parse_row(of, tmp_path), RowRef("test", 0, 0, "row")).input_ids.tolist()

    def sized(count: int) -> dict[str, Any]:
        tries = (row(f"t{count}", words, after=end) for words in range(40) for end in ("", "b", "b?", "b?b"))
        return next(of for of in tries if len(tokens(of)) == count)

    small, across = picture(tmp_path, 64, 64), picture(tmp_path, 5 * unit, 4 * unit, "m.png")
    large = picture(tmp_path, 8 * unit, 8 * unit, "q.png")
    tries = (row("middle", words, across, after="b " * 10) for words in range(40))
    middle = next(of for of in tries if tokens(of).index(measure.vision_start) == 30)
    rows = [sized(limit - 1), sized(limit), row("small", 0, small), row("large", 1, large), middle]
    rows.insert(place, sized(limit + 1))
    lengths = {of["id"]: len(tokens(of)) for of in rows}
    slots = {of["id"]: tokens(of).count(measure.image_token) for of in rows}
    assert (lengths["t47"], lengths["t48"], lengths["t49"]) == (47, 48, 49)
    assert (slots["large"], slots["middle"]) == (64, 20)   # 30 + 20 > 48: the limit falls into the picture
    job = make_job(
        write_jsonl(tmp_path / "rows.jsonl", rows), packing_length=limit, overlong=overlong,
        num_logical_shards=1, shuffle=False,
    )  # fmt: skip
    make = partial(build, max_length=limit, overlong=overlong)
    loader = Loader(job, make, dp_rank=0, dp_size=1)
    micros = [micro for step in steps_of_epoch(loader) for micro in step]
    seen = [of.id for micro in micros for of in micro.rows]
    skipped = {record.id: record.kind for record in loader.take_skipped()}
    too_long = {id_ for id_, count in lengths.items() if count > limit}
    assert too_long == {"large", "middle", "t49"}
    assert skipped == dict.fromkeys(too_long, "truncated" if overlong == "truncate" else "overlong")
    assert sorted(seen) == sorted(lengths if overlong == "truncate" else set(lengths) - too_long)
    assert loader.skipped_total == (0 if overlong == "truncate" else 3)
    for micro in micros:
        held = (micro.input_ids == measure.image_token).sum() * measure.merge**2
        assert held == micro.media["image_grid_thw"].prod(1).sum() == len(micro.media["pixel_bytes"])
        assert 0 < micro.num_tokens <= limit


def test_extra_kwargs_are_checked(build: Build) -> None:
    with pytest.raises(UserError) as caught:
        build(extra_kwargs={"image_max_pixel": 5, "min_pixels": 0})
    message = str(caught.value)
    assert "did you mean 'image_max_pixels'?" in message
    assert "min_pixels=0" in message
    with pytest.raises(UserError, match="same setting"):
        build(extra_kwargs={"max_pixels": 9999, "image_max_pixels": 9999})
    with pytest.raises(UserError, match="least"):
        build(extra_kwargs={"image_min_pixels": 9999, "image_max_pixels": 99})
    with pytest.raises(UserError, match="fps=0"):
        build(fps=0.0)
    limited = build(extra_kwargs={"max_pixels": 50_000, "video_max_pixels": 20_000, "video_min_pixels": 3000})
    assert limited.images.size.longest_edge == 50_000
    assert limited.videos.size.shortest_edge == 3000


def test_saved_processor_has_the_limits_trained_with(
    build: Build, sample: Make, tmp_path: Path
) -> None:
    processor = build(
        extra_kwargs={"image_max_pixels": 100 * 100}, video_max_pixels=90 * 90, video_max_frames=12, fps=3.0
    )
    processor.save_pretrained(tmp_path / "out")
    opened = AutoProcessor.from_pretrained(tmp_path / "out")
    assert opened.image_processor.to_dict() == processor.images.to_dict()
    assert opened.video_processor.to_dict() == processor.videos.to_dict()
    assert opened.chat_template == processor.chat.template
    assert opened.video_processor.fps == 3.0
    assert opened.video_processor.max_frames == 12
    part = picture(tmp_path, 300, 200)
    ours = sample(processor, [part], "a").media
    theirs = opened.image_processor(images=[Image.open(tmp_path / part["path"])], return_tensors="pt")
    torch.testing.assert_close(pixel_values(processor, ours), theirs["pixel_values"], rtol=0, atol=0)
    assert ours["image_grid_thw"].tolist() == theirs["image_grid_thw"].tolist()


def test_fingerprint_sees_what_changes_a_sample(build: Build) -> None:
    base = build().fingerprint
    assert build().fingerprint == base
    changes: list[dict[str, Any]] = [
        {"fps": 1.0},
        {"video_max_pixels": 10_000},
        {"video_max_frames": 9},
        {"extra_kwargs": {"image_max_pixels": 10_000}},
        {"max_length": 9, "overlong": "truncate"},
    ]
    assert len({base, *(build(**change).fingerprint for change in changes)}) == 1 + len(changes)
    processor = build()
    processor.chat.template += " "
    assert processor.fingerprint != base


def test_it_survives_a_trip_to_a_worker(build: Build, sample: Make, tmp_path: Path) -> None:
    processor = build()
    part = picture(tmp_path, 60, 60)
    one, other = (sample(p, [part], "a") for p in (processor, pickle.loads(pickle.dumps(processor))))
    assert torch.equal(one.input_ids, other.input_ids)
    assert torch.equal(one.media["pixel_bytes"], other.media["pixel_bytes"])


def test_wrong_folder_is_a_clear_error(build: Build, folders: Path, family: str, tmp_path: Path) -> None:
    ours = type(build())
    with pytest.raises(UserError, match=r"processor_name=.*nothing: no processor.*no such folder"):
        ours.from_pretrained(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"processor_name=\S+: no processor can be opened: "):
        ours.from_pretrained(tmp_path)   # a folder without one
    other = {"qwen3_vl": "qwen2_5_vl", "qwen2_5_vl": "qwen3_vl"}[family]
    with pytest.raises(UserError, match="needs a Qwen"):
        ours.from_pretrained(folders / other)
    config_class = {"qwen3_vl": Qwen3VLConfig, "qwen2_5_vl": Qwen2_5_VLConfig}[family]
    config = config_class(vision_config={"patch_size": 8})
    with pytest.raises(UserError, match="patch_size"):
        build(config=config)
    with pytest.raises(UserError, match="config"):
        build(config=None).tower_inputs({"image_grid_thw": torch.tensor([[1, 2, 2]])})


def test_positions_of_pieces() -> None:
    positions = mrope_positions([2, Slots(9, (1, 2, 3)), 1, Slots(9, (2, 1, 1), (0, 5)), 2, 0])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 11, 12, 13],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 12, 13],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 12, 13],
    ]
