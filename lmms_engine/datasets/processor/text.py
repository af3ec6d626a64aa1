"""Row to Sample for models that read text alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lmms_engine.datasets.chat import ChatTemplate, cut_at_turn
from lmms_engine.datasets.processor.base import KeyRule, digest
from lmms_engine.datasets.sample import Sample
from lmms_engine.errors import BadRow, UserError
from lmms_engine.folders import missing_folder
from lmms_engine.registry import nearest
from lmms_engine.segments import RowRef

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

    from lmms_engine.datasets.schema import Row

IGNORE = -100
EXTRA_KWARGS = ("chat_template",)


class TextProcessor:
    """The model's chat template and tokenizer; positions count from 0. Satisfies the Processor protocol.

    max_length, overlong: with `truncate`, longer rows lose whole turns at their end; else their length is
    only reported.
    """

    keys: ClassVar[dict[str, KeyRule]] = {}

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, max_length: int | None, overlong: str
    ) -> None:
        if not isinstance(tokenizer.chat_template, str):
            raise UserError(
                "the tokenizer has no chat template (chat_template.jinja), or several; name one in "
                "dataset_config.processor_config.extra_kwargs.chat_template"
            )
        self.tokenizer = tokenizer
        self.max_length, self.truncates = max_length, overlong == "truncate"
        self.chat = ChatTemplate(tokenizer, tokenizer.chat_template, {})

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
    ) -> TextProcessor:
        """Opens the tokenizer in a folder or on the hub; UserError if there is none.

        extra_kwargs: `chat_template`, the path of a jinja file that replaces the tokenizer's own template.
        The settings of clips mean nothing here.
        """
        from transformers import AutoTokenizer

        template = _template(extra_kwargs or {})
        if (missing := missing_folder(folder_or_id)) is not None:
            raise UserError(f"no tokenizer can be opened from {folder_or_id}: {missing}")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder_or_id))
        except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"no tokenizer can be opened from {folder_or_id}: {reason}") from None
        if template is not None:
            tokenizer.chat_template = template
        return cls(tokenizer, max_length=max_length, overlong=overlong)

    def __call__(self, row: Row, ref: RowRef) -> Sample:
        """The row as a Sample; rows with media raise BadRow."""
        for part in row.media():
            raise BadRow(
                "unsupported_media",
                f"the row holds {part.kind} ({part.label}), and this model reads text alone",
            )
        ids, supervised, ends = self.chat.encode_turns(self.chat.render(row))
        length = len(ids)
        if self.truncates and self.max_length is not None:
            cut = cut_at_turn(length, ends, self.max_length)
            ids, supervised = ids[:cut], supervised[:cut]
        labels = np.full(len(ids), IGNORE, dtype=np.int64)
        labels[:-1] = np.where(supervised[1:], ids[1:], IGNORE)
        return Sample(
            row=ref,
            input_ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            loss_weights=torch.from_numpy((labels != IGNORE).astype(np.float32)),
            position_ids=torch.arange(len(ids)),
            truncated=len(ids) < length,
        )

    def stand_in(self) -> None:
        """None: there is no tower to run."""
        return None

    def tower_inputs(self, media: Mapping[str, Tensor]) -> dict[str, Tensor | int]:
        """Nothing."""
        return {}

    @property
    def identity(self) -> dict[str, Any]:
        """Every setting that changes a sample; tokenizer and template as digests."""
        return {
            "processor": type(self).__name__,
            "tokenizer": digest(self.tokenizer.backend_tokenizer.to_str()),
            "chat_template": digest(self.chat.template),
            "max_length": self.max_length if self.truncates else None,
        }

    @cached_property
    def fingerprint(self) -> str:
        """A digest of `identity`."""
        return digest(self.identity)

    def save_pretrained(self, folder: Path) -> None:
        """Writes the tokenizer with the template trained with."""
        self.tokenizer.save_pretrained(str(folder))


def _template(extra_kwargs: Mapping[str, Any]) -> str | None:
    """The template that `processor_config.extra_kwargs` names, if any."""
    where = "dataset_config.processor_config.extra_kwargs"
    if unknown := [key for key in extra_kwargs if key not in EXTRA_KWARGS]:
        legal = ", ".join(EXTRA_KWARGS)
        raise UserError(
            f"{where}: unknown key '{unknown[0]}' (legal: {legal}){nearest(unknown[0], list(EXTRA_KWARGS))}"
        )
    path = extra_kwargs.get("chat_template")
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, TypeError) as error:
        raise UserError(f"{where}.chat_template={path!r}: cannot be read: {error}") from None
