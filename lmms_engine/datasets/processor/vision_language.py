"""Row to Sample for models that read pictures and clips: what their families share.

A family's processor subclasses `VisionLanguageProcessor` and states three things: how a clip is written into
the text, the temporal positions inside it, and what its tower wants precomputed.

The path of a row: media are decoded, resized by the library's own rule and cut into patches -> the template
is rendered and tokenised -> each placeholder token becomes as many slots as its medium has features -> M-RoPE
positions, shifted labels. Pictures and clips share their tensors, patches and `image_grid_thw` [n, 3], in
order of appearance. Ids equal those of the library's processor given the same frames and times; so do the
pixels, which travel as bytes and become floats at the model (pixels.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lmms_engine.datasets.chat import ChatTemplate, cut_at_turn
from lmms_engine.datasets.processor import pixels
from lmms_engine.datasets.processor.base import KeyRule, digest
from lmms_engine.datasets.processor.visuals import Visual, Visuals
from lmms_engine.datasets.sample import Sample
from lmms_engine.errors import BadRow, UserError
from lmms_engine.folders import missing_folder
from lmms_engine.registry import nearest
from lmms_engine.segments import RowRef

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

    from lmms_engine.datasets.schema import Row

IGNORE = -100

# processor_config.extra_kwargs -> (which of the library's processors, which end of its pixel range)
PIXEL_LIMITS = {
    "image_min_pixels": ("image_processor", "shortest_edge"),
    "image_max_pixels": ("image_processor", "longest_edge"),
    "video_min_pixels": ("video_processor", "shortest_edge"),
    "video_max_pixels": ("video_processor", "longest_edge"),
}
ALIASES = {"min_pixels": "image_min_pixels", "max_pixels": "image_max_pixels"}


@dataclass(frozen=True)
class Slots:
    """Placeholders for the features of a picture, or of a clip or one group of its frames.

    token: the placeholder's id. grid: groups, rows, columns in features.
    steps: temporal position of each group, counted from the first; None: 0.
    """

    token: int
    grid: tuple[int, int, int]
    steps: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return math.prod(self.grid)


Piece = list[int] | Slots   # token ids of text, or slots


def mrope_positions(pieces: Sequence[int | Slots]) -> np.ndarray:
    """Time, height and width of every token, int64 [3, T].

    pieces: how many text tokens, or slots, in order. Text counts on along all three axes; slots count rows
    and columns from where the text stopped; what follows starts at 1 + the largest index on any axis.
    """
    blocks, start = [], 0
    for piece in pieces:
        if isinstance(piece, int):
            block = np.broadcast_to(np.arange(piece), (3, piece))
        else:
            t, h, w = piece.grid
            axes = (np.asarray(piece.steps or (0,) * t), np.arange(h), np.arange(w))
            block = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(3, -1)
        blocks.append(block + start)
        start += int(block.max()) + 1 if block.size else 0
    return np.concatenate(blocks, axis=1).astype(np.int64)


class VisionLanguageProcessor:
    """The shared part; see the module's docstring. Satisfies the Processor protocol.

    hf: the library's processor; its pixel limits and sampling rate are set to those trained with, so that
    `save_pretrained` exports them. config: the model's, for what the processor's files do not say.
    max_length, overlong: with `truncate`, longer rows lose whole turns at their end, with their media; else
    their length is only reported. fps: frames per second, unless a clip states its own. video_max_pixels:
    per frame.
    """

    hf_class: ClassVar[str]
    sound = "this model takes no sound; remove the part, or train a family that listens"
    keys: ClassVar[dict[str, KeyRule]] = {
        "pixel_values": KeyRule(0), "image_grid_thw": KeyRule(0), **pixels.KEYS,
    }  # fmt: skip

    def __init__(
        self,
        hf: ProcessorMixin,
        *,
        config: PretrainedConfig | None,
        max_length: int | None,
        fps: float,
        video_max_pixels: int,
        video_max_frames: int,
        extra_kwargs: Mapping[str, Any],
        overlong: str,
    ) -> None:
        if type(hf).__name__ != self.hf_class:
            raise UserError(
                f"dataset_config.processor_config: the folder holds a {type(hf).__name__}, but this model"
                f" needs a {self.hf_class}; give the model's own processor in `processor_name`"
            )
        if not fps > 0 or video_max_frames < 1 or video_max_pixels < 1:
            raise UserError(
                f"dataset_config: fps={fps}, video_max_frames={video_max_frames},"
                f" video_max_pixels={video_max_pixels} must all be positive"
            )
        self.hf, self.tokenizer = hf, hf.tokenizer
        self.images, self.videos = hf.image_processor, hf.video_processor
        self.merge, self.patch = self.images.merge_size, self.images.patch_size
        self.temporal_patch = self.images.temporal_patch_size
        self.fps, self.max_length, self.truncates = fps, max_length, overlong == "truncate"
        self._config = config
        limits = read_pixel_limits({"video_max_pixels": video_max_pixels, **extra_kwargs})
        self._set_limits(limits, video_max_frames)
        self._check_sizes()
        self.visuals = Visuals(self.images, self.videos)
        self.image_token: int = hf.image_token_id
        self.video_token: int = hf.video_token_id
        self.vision_start = self._id("<|vision_start|>")
        self.vision_end = self._id("<|vision_end|>")
        self.chat = ChatTemplate(
            self.tokenizer, _template(hf), {"image": hf.image_token, "video": hf.video_token}
        )

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | Path,
        *,
        config: PretrainedConfig | None = None,
        max_length: int | None = None,
        fps: float = 1.0,
        video_max_pixels: int = 602_112,
        video_max_frames: int = 768,
        extra_kwargs: Mapping[str, Any] | None = None,
        overlong: str = "drop",
    ) -> VisionLanguageProcessor:
        """Opens the library's processor in a folder or on the hub; UserError if there is none.

        config: the model's config. Without it only what needs no model works: `tower_inputs`, and positions
        of clips where the model scales time, raise UserError.
        """
        from transformers import AutoProcessor

        where = f"dataset_config.processor_config.processor_name={folder_or_id}"
        if (missing := missing_folder(folder_or_id)) is not None:
            raise UserError(f"{where}: no processor can be opened: {missing}")
        try:
            hf = AutoProcessor.from_pretrained(str(folder_or_id))
        except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"{where}: no processor can be opened: {reason}") from None
        return cls(
            hf,
            config=config,
            max_length=max_length,
            fps=fps,
            video_max_pixels=video_max_pixels,
            video_max_frames=video_max_frames,
            extra_kwargs=extra_kwargs or {},
            overlong=overlong,
        )

    # What a family states ----------------------------------------------------------------------------

    def clip_pieces(self, clip: Visual) -> list[Piece]:
        """What stands in the place of the clip's placeholder token."""
        raise NotImplementedError(f"{type(self).__name__} does not say how a clip is written")

    def tower_indices(self, grids: np.ndarray) -> dict[str, Tensor | int]:
        """The tower's index tensors for the joined grids [n, 3], as `image_*` keyword arguments."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its tower wants")

    # The Processor protocol --------------------------------------------------------------------------

    def __call__(self, row: Row, ref: RowRef) -> Sample:
        """The row as a Sample."""
        for part in row.media():
            if part.kind == "audio":
                raise BadRow("unsupported_media", f"the row holds sound ({part.label}): {self.sound}")
        rendered = self.chat.render(row)   # before any decoding: it refuses rows cheaply
        ids, supervised, turns = self.chat.encode_turns(rendered)
        visuals = [self.visuals.open(part) for part in row.media()]
        return self._assemble(ids, supervised, turns, visuals, ref)

    def stand_in(self) -> Sample:
        """One picture of the smallest legal grid, all zeros, without weight."""
        ids = np.array([self.vision_start, self.image_token, self.vision_end])
        ref = RowRef(source="stand-in", shard=0, row=0, id="stand-in")
        return self._assemble(ids, np.zeros(3, dtype=bool), np.array([3]), [self.visuals.blank()], ref)

    def tower_inputs(self, media: Mapping[str, Tensor]) -> dict[str, Tensor | int]:
        """What the model needs besides the joined media, in order not to ask the device for it."""
        inputs = self.tower_indices(media["image_grid_thw"].numpy())
        if "pixel_bytes" in media:
            inputs |= pixels.pixel_inputs(media, self.visuals.levels, self.temporal_patch)
        return inputs

    @property
    def identity(self) -> dict[str, Any]:
        """Every setting that changes a sample; tokenizer and template as digests."""
        return {
            "processor": type(self).__name__,
            "tokenizer": digest(self.tokenizer.backend_tokenizer.to_str()),
            "chat_template": digest(self.chat.template),
            "image_processor": self.images.to_dict(),
            "video_processor": self.videos.to_dict(),
            "fps": self.fps,
            "max_length": self.max_length if self.truncates else None,
        }

    @cached_property
    def fingerprint(self) -> str:
        """A digest of `identity`."""
        return digest(self.identity)

    def save_pretrained(self, folder: Path) -> None:
        """Writes the library's processor with the pixel limits and sampling trained with."""
        self.hf.save_pretrained(folder)

    # Sequence ----------------------------------------------------------------------------------------

    def _assemble(
        self,
        ids: np.ndarray,
        supervised: np.ndarray,
        turns: np.ndarray,
        visuals: list[Visual],
        ref: RowRef,
    ) -> Sample:
        """Puts slots for the placeholders; `ids` has exactly one per visual, in order.

        turns: where answers end; a row that is too long is cut at one.
        """
        places = np.flatnonzero((ids == self.image_token) | (ids == self.video_token))
        kinds = ["image" if ids[place] == self.image_token else "video" for place in places]
        if kinds != [visual.kind for visual in visuals]:
            found = ", ".join(kinds)
            raise BadRow("media_order", f"the chat template changes the order of the media, to {found}")
        # Marks around a picture in the assistant's turn are no answer.
        supervised = supervised & (ids != self.vision_start) & (ids != self.vision_end)
        pieces: list[Piece] = []
        weights: list[np.ndarray] = []
        sizes: list[int] = []
        before = 0
        for place, visual in zip(places, visuals, strict=True):
            inner = self._visual_pieces(visual)
            size = sum(map(len, inner))
            pieces += [ids[before:place].tolist(), *inner]
            weights += [supervised[before:place], np.zeros(size, dtype=bool)]
            sizes.append(size)
            before = place + 1
        pieces.append(ids[before:].tolist())
        weights.append(supervised[before:])
        flat = np.concatenate([_ids(piece) for piece in pieces])
        positions = mrope_positions([p if isinstance(p, Slots) else len(p) for p in pieces])
        # Each placeholder before the end of an answer has become its slots.
        added = np.concatenate([[0], np.cumsum(np.array(sizes, dtype=np.int64) - 1)])
        turns = turns + added[np.searchsorted(places, turns)]
        cut = len(flat)
        if self.truncates and self.max_length is not None:
            cut = cut_at_turn(cut, turns, self.max_length)
        kept = visuals[: int((places + added[:-1] < cut).sum())]
        return self._sample(flat, np.concatenate(weights), positions, kept, cut, ref)

    def _visual_pieces(self, visual: Visual) -> list[Piece]:
        t, h, w = visual.grid
        features = len(visual.pixels) // self.merge**2
        if visual.kind == "image":
            pieces: list[Piece] = [Slots(self.image_token, (t, h // self.merge, w // self.merge))]
        else:
            pieces = self.clip_pieces(visual)
        slots = sum(len(piece) for piece in pieces if isinstance(piece, Slots))
        assert slots == features, f"{slots} slots for {features} features of a grid {visual.grid}"
        return pieces

    def _sample(
        self,
        ids: np.ndarray,
        supervised: np.ndarray,
        positions: np.ndarray,
        visuals: list[Visual],
        cut: int,
        ref: RowRef,
    ) -> Sample:
        """The first `cut` tokens and the media that stand in them."""
        length = len(ids)
        ids, supervised = ids[:cut], supervised[:cut]
        labels = np.full(cut, IGNORE, dtype=np.int64)
        labels[:-1] = np.where(supervised[1:], ids[1:], IGNORE)
        weights = np.zeros(cut, dtype=np.float32)
        weights[:-1] = supervised[1:]
        return Sample(
            row=ref,
            input_ids=torch.from_numpy(ids.astype(np.int64)),
            labels=torch.from_numpy(labels),
            loss_weights=torch.from_numpy(weights),
            position_ids=torch.from_numpy(np.ascontiguousarray(positions[:, :cut])),
            media=self.visuals.join(visuals) if visuals else {},
            truncated=cut < length,
        )

    # Settings ----------------------------------------------------------------------------------------

    def _set_limits(self, limits: dict[str, int], video_max_frames: int) -> None:
        for name, value in limits.items():
            if name == "video_max_pixels":
                continue
            part, edge = PIXEL_LIMITS[name]
            _set_size(getattr(self.hf, part), edge, value)
        cap = limits["video_max_pixels"]
        self._cap_frames(cap)
        self.videos.cap_pixels_per_frame = True
        self.videos.fps, self.videos.max_frames = self.fps, video_max_frames
        self.videos.min_frames = min(self.videos.min_frames, video_max_frames)
        for part in (self.images, self.videos):
            if part.size.shortest_edge > part.size.longest_edge:
                raise UserError(
                    f"dataset_config.processor_config.extra_kwargs: {type(part).__name__} would have a least"
                    f" size of {part.size.shortest_edge} pixels and a largest of {part.size.longest_edge}"
                )

    def _cap_frames(self, max_pixels: int) -> None:
        """Limits a frame to `max_pixels`; where the processor's range counts a frame, as it is here."""
        _set_size(self.videos, "longest_edge", max_pixels)
        _set_size(self.videos, "shortest_edge", min(self.videos.size.shortest_edge, int(max_pixels / 1.05)))

    def _check_sizes(self) -> None:
        """The library's picture and video processor, and the model, must cut the same patches."""
        for name in ("patch_size", "merge_size", "temporal_patch_size"):
            if getattr(self.images, name) != getattr(self.videos, name):
                raise UserError(
                    f"processor: {name} is {getattr(self.images, name)} for pictures and"
                    f" {getattr(self.videos, name)} for video; pictures and clips share one tower"
                )
        if self._config is None:
            return
        vision = self._config.vision_config
        for ours, theirs in (
            ("patch_size", "patch_size"),
            ("merge_size", "spatial_merge_size"),
            ("temporal_patch_size", "temporal_patch_size"),
        ):
            if getattr(self.images, ours) != getattr(vision, theirs):
                raise UserError(
                    f"the processor's {ours}={getattr(self.images, ours)} differs from the model's"
                    f" vision_config.{theirs}={getattr(vision, theirs)}; use the model's own processor"
                )

    @property
    def vision_config(self) -> PretrainedConfig:
        """The model's vision config; UserError if the processor was opened without a model."""
        if self._config is None:
            raise UserError(
                f"{type(self).__name__} was opened without the model's config, which this needs:"
                " pass `config=` to from_pretrained"
            )
        return self._config.vision_config

    def _id(self, token: str) -> int:
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        if token_id is None or token_id == self.tokenizer.unk_token_id:
            raise UserError(f"the tokenizer has no token {token!r}; it is not one of a Qwen vision model")
        return token_id


def read_pixel_limits(extra_kwargs: Mapping[str, Any]) -> dict[str, int]:
    """`processor_config.extra_kwargs` by full names; all problems in one UserError."""
    limits: dict[str, int] = {}
    problems = []
    legal = [*PIXEL_LIMITS, *ALIASES]
    for key, value in extra_kwargs.items():
        name = ALIASES.get(key, key)
        if name not in PIXEL_LIMITS:
            problems.append(f"unknown key '{key}' (legal: {', '.join(legal)}){nearest(key, legal)}")
        elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"{key}={value!r} must be a positive number of pixels")
        elif name in limits:
            problems.append(f"'{key}' and '{name}' are the same setting; keep one")
        else:
            limits[name] = value
    if problems:
        raise UserError("dataset_config.processor_config.extra_kwargs: " + "; ".join(problems))
    return limits


def _set_size(processor: Any, edge: str, value: int) -> None:
    edges = {"shortest_edge": processor.size.shortest_edge, "longest_edge": processor.size.longest_edge}
    processor.size = type(processor.size)(**{**edges, edge: value})


def _template(hf: ProcessorMixin) -> str:
    template = hf.chat_template or hf.tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        raise UserError("the processor has no chat template (chat_template.jinja); chat rows need one")
    return template


def _ids(piece: Piece) -> np.ndarray:
    return np.full(len(piece), piece.token) if isinstance(piece, Slots) else np.asarray(piece, dtype=np.int64)
