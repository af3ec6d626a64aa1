"""A small byte-level BPE tokenizer with the Qwen special tokens and a ChatML template.

It stands in for a real Qwen tokenizer in smoke runs: same class (`Qwen2Tokenizer`), same marks, 544 ids
instead of 151,936. It is trained on a fixed text, so the ids below hold whatever the seed and number of rows:

    0..511      text (256 bytes and 256 merges; any UTF-8 text can be written)
    512..       SPECIAL_TOKENS in order: <|endoftext|> 512, <|im_start|> 513, <|im_end|> 514,
                <|vision_start|> 521, <|vision_end|> 522, <|vision_pad|> 523,
                <|image_pad|> 524, <|video_pad|> 525,
                <|audio_start|> 538, <|audio_end|> 539, <|audio_pad|> 540
    VOCAB_SIZE  544: what a model's config should name (the last three ids are unused)
"""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from data_prep.chats import answers, corpus

NUM_TEXT_IDS = 512
VOCAB_SIZE = 544
SPECIAL_TOKENS: tuple[str, ...] = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
)
# Token id of each special token, by construction.
IDS: dict[str, int] = {token: NUM_TEXT_IDS + n for n, token in enumerate(SPECIAL_TOKENS)}
# As in the real tokenizers, these are whole tokens but stay in the text when special ones are skipped.
_NOT_SPECIAL = frozenset(SPECIAL_TOKENS[14:26])  # <tool_call> to </think>
# Attribute of the tokenizer -> token, as the library's processors look them up (`tokenizer.image_token_id`).
_NAMED_TOKENS: dict[str, str] = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "audio_start_token": "<|audio_start|>",
    "audio_end_token": "<|audio_end|>",
}
# Common words, so that text of the user's own does not fall into single bytes.
_COMMON_WORDS = (
    "the of and to a in that it is was for on are as with his they at be this from have or by one had not "
    "but what all were when we there can an your which their said if do will each about how up out them "
    "then she many some so these would other into has more her two like him see time could no make than "
    "first been its who now people my made over did down only way find use may water long little very "
    "after words called just where most know"
)
# ChatML without a default system prompt. Each turn is rendered from that turn alone (tool results are not
# grouped), so a conversation's beginning is rendered as the beginning of the whole: label masks rely on it.
CHAT_TEMPLATE = """\
{%- macro render(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content -%}
        {%- for part in content -%}
            {%- if part is string -%}
                {{- part -}}
            {%- elif part.type in ('image', 'image_url') -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type in ('video', 'video_url') -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif part.type in ('audio', 'audio_url', 'input_audio') -%}
                {{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
            {%- elif part.type == 'text' -%}
                {{- part.text -}}
            {%- else -%}
                {{- raise_exception('unknown content part: ' ~ part.type) -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set system_first = messages and messages[0].role == 'system' -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if system_first -%}
        {{- render(messages[0].content) ~ '\\n\\n' -}}
    {%- endif -%}
    {{- 'These functions can be called, one JSON description a line:\\n' -}}
    {%- for tool in tools -%}
        {{- tool | tojson ~ '\\n' -}}
    {%- endfor -%}
    {{- 'Call one as <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' and tools and loop.first -%}
        {#- rendered above, together with the tools -#}
    {%- elif message.role in ('system', 'user') -%}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ render(message.content) ~ '<|im_end|>\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' ~ render(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function or call -%}
            {%- set arguments = function.arguments -%}
            {{- '\\n' if message.content or not loop.first -}}
            {{- '<tool_call>\\n{"name": ' ~ function.name | tojson ~ ', "arguments": ' -}}
            {{- (arguments if arguments is string else arguments | tojson) ~ '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ render(message.content) -}}
        {{- '\\n</tool_response><|im_end|>\\n' -}}
    {%- else -%}
        {{- raise_exception('unknown role: ' ~ message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def build_tokenizer() -> Qwen2Tokenizer:
    """The sample's tokenizer, trained afresh (well under a second); always the same."""
    vocab, merges = _train()
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        added_tokens_decoder={
            IDS[token]: AddedToken(token, special=token not in _NOT_SPECIAL, normalized=False)
            for token in SPECIAL_TOKENS
        },
        extra_special_tokens=_NAMED_TOKENS,
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    wrong = {t: i for t, i in IDS.items() if tokenizer.convert_tokens_to_ids(t) != i}
    assert not wrong, f"ids moved: {wrong}"
    assert len(tokenizer) <= VOCAB_SIZE
    return tokenizer


def _train() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary of exactly NUM_TEXT_IDS entries and merges, split as Qwen2Tokenizer will split."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer.pre_tokenizer
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TEXT_IDS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Answers and the words of the template weigh most: each becomes one token, so an answer is one decision.
    heavy = [*answers(), "system", "user", "assistant", " seconds", "?\n", ".\n"]
    texts = [*corpus(), *(f" {word}" for word in _COMMON_WORDS.split()), *heavy * 100]
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    assert len(model["vocab"]) == NUM_TEXT_IDS, f"the fixed text gives {len(model['vocab'])} entries"
    return model["vocab"], [tuple(merge) for merge in model["merges"]]
