"""The tokenizer: fixed ids, whole answers, any text, and a prefix-stable ChatML template."""

from __future__ import annotations

from typing import Any

import pytest

from data_prep.chats import answers, facts
from data_prep.tokenizer import IDS, NUM_TEXT_IDS, SPECIAL_TOKENS, VOCAB_SIZE, build_tokenizer

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
]
PICTURE = {"type": "image_url", "image_url": {"url": "a.png"}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {"role": "user", "content": "What is 1 plus 2?"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "And 2 plus 2?"},
        {"role": "assistant", "content": "4"},
    ],
    "media": [
        {"role": "system", "content": [{"type": "text", "text": "Answer in one word."}]},
        {"role": "user", "content": [PICTURE, {"type": "image"}, {"type": "text", "text": "Which?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "first"}]},
        {"role": "user", "content": [{"type": "video"}, {"type": "audio_url"}]},
        {"role": "assistant", "content": "left"},
    ],
    "tools": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Add."},
        {
            "role": "assistant",
            "content": "Yes.",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}},
                {"name": "add", "arguments": '{"a": 2}'},
            ],
        },
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": [{"type": "text", "text": "2"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {}}]},
    ],
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def test_ids_are_where_they_are_documented(tokenizer: Any) -> None:
    documented = {"<|endoftext|>": 512, "<|im_start|>": 513, "<|im_end|>": 514, "<|vision_start|>": 521}
    documented |= {"<|vision_end|>": 522, "<|image_pad|>": 524, "<|video_pad|>": 525, "<|audio_pad|>": 540}
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in documented} == documented
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(IDS.values())
    assert len(tokenizer) == NUM_TEXT_IDS + len(SPECIAL_TOKENS) <= VOCAB_SIZE
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_media_tokens_are_attributes(tokenizer: Any) -> None:
    assert tokenizer.image_token_id == IDS["<|image_pad|>"]
    assert tokenizer.video_token_id == IDS["<|video_pad|>"]
    assert tokenizer.audio_token_id == IDS["<|audio_pad|>"]
    assert tokenizer.vision_start_token_id == IDS["<|vision_start|>"]
    assert tokenizer.vision_end_token_id == IDS["<|vision_end|>"]


def test_training_again_gives_the_same_tokenizer(tokenizer: Any) -> None:
    assert build_tokenizer().backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_every_answer_and_role_is_one_token(tokenizer: Any) -> None:
    words = [*answers(), *(answer for _, answer in facts()), "system", "user", "assistant", " seconds"]
    assert {word: len(tokenizer(word)["input_ids"]) for word in words} == dict.fromkeys(words, 1)


@pytest.mark.parametrize(
    "text", ["What colour is the circle?", "Ünï 日本 🙂\r\n\t x  y", "don't 3.14 <b>", "\x00\x7f"]
)
def test_any_text_survives(text: str, tokenizer: Any) -> None:
    ids = tokenizer(text)["input_ids"]
    assert max(ids) < NUM_TEXT_IDS
    assert tokenizer.decode(ids) == text


def test_time_stamps_are_short(tokenizer: Any) -> None:
    assert len(tokenizer("<12.3 seconds>")["input_ids"]) == 7


def test_tool_marks_stay_when_special_tokens_are_skipped(tokenizer: Any) -> None:
    ids = tokenizer("<|im_start|><tool_call>a</tool_call><|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>a</tool_call>"


def test_template_is_chatml_without_a_default_system_turn(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(CHATS["plain"][:2], tokenize=False)
    assert text == "<|im_start|>user\nWhat is 1 plus 2?<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"


def test_template_marks_media_in_their_place(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(CHATS["media"], tokenize=False)
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"<|im_start|>user\n{picture}{picture}Which?<|im_end|>\n" in text
    marks = "<|vision_start|><|video_pad|><|vision_end|><|audio_start|><|audio_pad|><|audio_end|>"
    assert f"<|im_start|>user\n{marks}<|im_end|>\n" in text


def test_template_renders_tools_and_calls(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(CHATS["tools"], tools=TOOLS, tokenize=False)
    assert text.count("<|im_start|>system\n") == 1
    assert text.startswith("<|im_start|>system\nUse tools.\n\nThese functions")
    assert '"name": "add", "description": "Add."' in text.split("<|im_end|>")[0]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
    other = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert f"<|im_start|>assistant\nYes.\n{call}\n{other}<|im_end|>\n" in text
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n" in text
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>\n'
    )


@pytest.mark.parametrize("name", CHATS)
def test_template_is_prefix_stable(name: str, tokenizer: Any) -> None:
    chat = CHATS[name]
    tools = TOOLS if name == "tools" else None
    whole = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
    for n in range(1, len(chat)):
        begin = tokenizer.apply_chat_template(chat[:n], tools=tools, tokenize=False)
        assert whole.startswith(begin)
        if chat[n]["role"] == "assistant":
            asked = tokenizer.apply_chat_template(
                chat[:n], tools=tools, tokenize=False, add_generation_prompt=True
            )
            assert whole.startswith(asked)
            assert asked == begin + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "message", [{"role": "robot", "content": "x"}, {"role": "user", "content": [{"type": "smell"}]}]
)
def test_template_refuses_what_it_does_not_know(message: dict[str, Any], tokenizer: Any) -> None:
    with pytest.raises(Exception, match=r"unknown (role: robot|content part: smell)"):
        tokenizer.apply_chat_template([message], tokenize=False)
