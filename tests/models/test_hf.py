"""Configs, weights and exports, with real files and the library as the judge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from lmms_engine.config import ModelSection
from lmms_engine.errors import UserError
from lmms_engine.models import hf
from lmms_engine.models.spec import MODELS
from tests.tiny import FAMILIES


def given(**values: Any) -> ModelSection:
    return ModelSection(**values)


def tiny_mapping(family: str) -> dict[str, Any]:
    """A family's tiny config, as a user writes it."""
    config = json.loads(MODELS.get(family).tiny()[0].config.to_json_string())
    for name in ("transformers_version", "architectures"):
        config.pop(name, None)
    return config


@pytest.fixture
def saved(tmp_path: Path, family: str) -> Path:
    """A folder that transformers itself wrote."""
    MODELS.get(family).tiny()[0].save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def weights(family: str, folder: Path | None, seed: int = 0) -> dict[str, Tensor]:
    spec = MODELS.get(family)
    config = spec.tiny()[0].config if folder is None else AutoConfig.from_pretrained(folder)
    return dict(hf.weight_stream(spec, config, folder, seed))


def assert_equal_to(model: nn.Module, stream: dict[str, Tensor]) -> None:
    expected = dict(model.named_parameters())
    assert stream.keys() == expected.keys()
    assert all(torch.equal(stream[name], tensor) for name, tensor in expected.items())


# ---- config ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_config_from_mapping_and_from_folder(family: str, saved: Path) -> None:
    flat = hf.read_config(given(load_from_config=tiny_mapping(family)))
    values = tiny_mapping(family)
    model_type = values.pop("model_type")
    nested = hf.read_config(given(load_from_config={"model_type": model_type, "config": values}))
    from_disk = hf.read_config(given(load_from_pretrained_path=str(saved)))
    for config in (flat, nested, from_disk):
        assert config.model_type == family
        assert config.text_config.vocab_size == 320
        assert {config.dtype, config.text_config.dtype, config.vision_config.dtype} == {torch.float32}
    assert flat.to_dict() == nested.to_dict()


def test_all_unknown_keys_at_once_with_the_nearest() -> None:
    values = tiny_mapping("qwen3_vl")
    values["image_tokenid"] = 1
    values["text_config"]["hiden_size"] = 8
    values["text_config"]["rope_parameters"]["mrope_sectoin"] = [1]
    values["vision_config"]["depht"] = 1
    with pytest.raises(UserError) as caught:
        hf.read_config(given(load_from_config=values))
    message = str(caught.value)
    for path, hint in (
        ("load_from_config.image_tokenid", "image_token_id"),
        ("load_from_config.text_config.hiden_size", "hidden_size"),
        ("load_from_config.text_config.rope_parameters.mrope_sectoin", "mrope_section"),
        ("load_from_config.vision_config.depht", "depth"),
    ):
        line = next(line for line in message.splitlines() if path in line)
        assert f"did you mean '{hint}'" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("model_type"), "`model_type` is missing"),
        (lambda c: c.update(model_type="qwen3_vll"), "unknown model 'qwen3_vll'.*did you mean 'qwen3_vl'"),
        (lambda c: c.update(config={}), "beside `config`"),
        (lambda c: c["text_config"].update(hidden_size="wide"), "hidden_size.*expected int"),
        (lambda c: c["text_config"]["rope_parameters"].update(mrope_section=[4, 4, 4]), "sums to 12.*8"),
    ],
)
def test_bad_configs(change: Any, message: str) -> None:
    values = tiny_mapping("qwen3_vl")
    change(values)
    with pytest.raises(UserError, match=message):
        hf.read_config(given(load_from_config=values))


def test_older_spelling_of_rope_is_legal() -> None:
    values = tiny_mapping("qwen2_5_vl")
    values["text_config"].pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    values["text_config"] |= {"rope_theta": 5.0, "rope_scaling": scaling}
    config = hf.read_config(given(load_from_config=values))
    assert config.text_config.rope_parameters["rope_theta"] == 5.0
    assert config.text_config.rope_parameters["mrope_section"] == [2, 3, 3]


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "runs/a/b", "nowhere"])
def test_missing_folder(path: str) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        hf.read_config(given(load_from_pretrained_path=path))


def test_unreachable_hub() -> None:
    with pytest.raises(UserError, match="neither a folder here nor to be had from the hub"):
        hf.read_config(given(load_from_pretrained_path="nobody/no-such-model"))


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no usable config\.json"):
        hf.read_config(given(load_from_pretrained_path=str(tmp_path)))


def test_folder_of_another_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="unknown model 'bert'"):
        hf.read_config(given(load_from_pretrained_path=str(tmp_path)))


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2", "jamba", "falcon_h1"])
def test_models_whose_layers_carry_a_state_are_refused(kind: str, tmp_path: Path) -> None:
    """A recurrent layer would carry it from one packed row into the next; no family here has one."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    sources = ({"load_from_pretrained_path": str(tmp_path)}, {"load_from_config": {"model_type": kind}})
    for source in sources:
        with pytest.raises(UserError, match=f"unknown model '{kind}' .legal: qwen2_5_vl, qwen3_moe, "):
            hf.read_config(given(**source))


# ---- building ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_meta_model_has_names_ties_and_no_storage(family: str) -> None:
    spec = MODELS.get(family)
    real, _ = spec.tiny()
    meta = hf.build_meta(spec, real.config)
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (meta, real)]
    assert shapes[0] == shapes[1]
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    assert {p.dtype for p in meta.parameters()} == {torch.float32}
    assert hf.tied_names(meta) == {"lm_head.weight": "model.language_model.embed_tokens.weight"}


@pytest.mark.parametrize("sizes", [{"hidden_size": 65}, {"num_hidden_layers": -1, "layer_types": None}])
def test_sizes_that_do_not_fit(sizes: dict[str, Any]) -> None:
    values = tiny_mapping("qwen2_5_vl")
    values["text_config"] |= sizes
    with pytest.raises(UserError, match="model_config"):
        hf.build_meta(MODELS.get("qwen2_5_vl"), hf.read_config(given(load_from_config=values)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_float32_whatever_the_config_says(family: str, dtype: str) -> None:
    spec = MODELS.get(family)
    model, _ = spec.tiny()
    values = tiny_mapping(family) | {"dtype": dtype}
    tables = hf.buffers(spec, hf.read_config(given(load_from_config=values)))
    expected = dict(model.named_buffers())
    assert tables.keys() == expected.keys()
    assert len(expected) == 4
    for name, table in expected.items():
        assert tables[name].dtype == torch.float32
        assert torch.equal(tables[name], table)


def test_buffers_of_other_modules_come_from_a_whole_build() -> None:
    spec = MODELS.get("qwen3_vl")
    config = spec.tiny()[0].config

    class WithTable(spec.model_class):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    tables = hf.buffers(replace(spec, model_class=WithTable), config)
    assert tables["table"].tolist() == [0, 1, 2]
    assert len(tables) == 5


# ---- weights in --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_follow_the_seed(family: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (weights(family, None, seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_are_the_librarys(family: str) -> None:
    """tiny() seeds with 0 and builds with the library alone."""
    assert_equal_to(MODELS.get(family).tiny()[0], weights(family, None, seed=0))


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_loads_bit_equal(family: str, saved: Path) -> None:
    assert_equal_to(MODELS.get(family).tiny()[0], weights(family, saved))


@pytest.mark.parametrize("family", FAMILIES)
def test_several_files_load_bit_equal(family: str, tmp_path: Path) -> None:
    model, _ = MODELS.get(family).tiny()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_equal_to(model, weights(family, tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["old", "new"])
def test_key_layouts(family: str, layout: str, tmp_path: Path, saved: Path) -> None:
    """Before version 4.52 of the library: `visual.` and `model.`; since: all under `model.`."""
    model, _ = MODELS.get(family).tiny()
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    if layout == "old":
        state = {n.replace("model.visual.", "visual."): t for n, t in state.items()}
        if family == "qwen2_5_vl":   # the other one never had the second half of it
            state = {n.replace("model.language_model.", "model."): t for n, t in state.items()}
    save_file(state, saved / hf.SINGLE, metadata={"format": "pt"})
    assert_equal_to(model, weights(family, saved))


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_checkpoints_become_float32(family: str, saved: Path) -> None:
    state = {n: t.bfloat16() for n, t in load_file(saved / hf.SINGLE).items()}
    save_file(state, saved / hf.SINGLE, metadata={"format": "pt"})
    assert {tensor.dtype for tensor in weights(family, saved).values()} == {torch.float32}


@pytest.mark.parametrize("family", ["qwen3_vl"])
@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "int8", "both of a tie"])
def test_checkpoints_that_do_not_fit(family: str, saved: Path, change: str) -> None:
    state = load_file(saved / hf.SINGLE)
    name = "model.visual.merger.linear_fc1.weight"
    if change == "missing":
        del state[name]
        message = r"1 weights missing \(model\.visual\.merger\.linear_fc1\.weight\), 0 unknown"
    elif change == "unknown":
        state["model.visual.extra.weight"] = torch.zeros(1)
        message = r"0 weights missing, 1 unknown \(model\.visual\.extra\.weight\)"
    elif change == "shape":
        state[name] = state[name][:-1].clone()
        message = r"is \[127, 128\] in the checkpoint and \[128, 128\] in the model"
    elif change == "int8":
        state[name] = state[name].to(torch.int8)
        message = r"linear_fc1\.weight is torch\.int8 in the checkpoint"
    else:
        state["lm_head.weight"] = state["model.language_model.embed_tokens.weight"].clone()
        message = None
    save_file(state, saved / hf.SINGLE, metadata={"format": "pt"})
    if message is None:
        assert_equal_to(MODELS.get(family).tiny()[0], weights(family, saved))
        return
    with pytest.raises(UserError, match=message):
        weights(family, saved)


@pytest.mark.parametrize("family", ["qwen3_vl"])
@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "absent", "index"])
def test_damaged_files(family: str, saved: Path, damage: str) -> None:
    file = saved / hf.SINGLE
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "noise":
        file.write_bytes(b"\xff" * 4096)
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "absent":
        file.unlink()
    else:
        (saved / hf.INDEX).write_text("{")
    messages = {"absent": "no weights", "index": "not a weight index"}
    expected = messages.get(damage, "not a whole safetensors file")
    with pytest.raises(UserError, match=expected):
        weights(family, saved)


@pytest.mark.parametrize("family", ["qwen3_vl"])
def test_file_named_by_the_index_is_missing(family: str, tmp_path: Path) -> None:
    MODELS.get(family).tiny()[0].save_pretrained(tmp_path, max_shard_size="50KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(UserError, match=r"model-00002.*not a whole safetensors file"):
        weights(family, tmp_path)


# ---- weights out -------------------------------------------------------------------------------------


def exported(family: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    spec = MODELS.get(family)
    config = spec.tiny()[0].config
    stream = hf.weight_stream(spec, config, None, 0)
    hf.export(spec, config, stream, folder, dtype=dtype, **options)
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_export_opens_with_the_same_logits(family: str, tmp_path: Path) -> None:
    model, samples = MODELS.get(family).tiny()
    opened = exported(family, tmp_path / "out")
    inputs = {"input_ids": samples[3].input_ids[None], "position_ids": samples[3].position_ids[:, None]}
    with torch.no_grad():
        assert torch.equal(opened(**inputs).logits, model(**inputs).logits)
    assert_equal_to(opened, dict(model.named_parameters()))
    assert opened.lm_head.weight is opened.model.language_model.embed_tokens.weight
    with safe_open(tmp_path / "out" / hf.SINGLE, framework="pt") as file:
        assert not [key for key in file.keys() if "lm_head" in key]   # tied: written once  # noqa: SIM118
    assert_equal_to(model, weights(family, tmp_path / "out"))


@pytest.mark.parametrize("family", FAMILIES)
def test_export_in_another_dtype(family: str, tmp_path: Path) -> None:
    model, _ = MODELS.get(family).tiny()
    opened = exported(family, tmp_path / "out", torch.bfloat16)
    assert {p.dtype for p in opened.parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    for name, table in model.named_buffers():
        assert torch.equal(dict(opened.named_buffers())[name], table)


class Papers:
    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def save_pretrained(self, folder: Path) -> None:
        if self.fails:
            raise OSError("disk full")
        (folder / "processor_config.json").write_text("{}")


def test_export_is_whole_or_absent(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"):
        exported("qwen3_vl", tmp_path / "out", processor=Papers(fails=True))
    assert list(tmp_path.iterdir()) == []


def test_export_replaces_and_keeps_what_belongs_to_it(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/stale.txt").write_text("old")
    (tmp_path / "source").mkdir()
    (tmp_path / "source/generation_config.json").write_text('{"temperature": 0.3, "do_sample": true}')
    exported("qwen3_vl", tmp_path / "out", processor=Papers(), source=tmp_path / "source")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", hf.SINGLE, "processor_config.json"}
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["temperature"] == 0.3
    assert {path.name for path in tmp_path.iterdir()} == {"out", "source"}


def test_export_refuses_half_a_model(tmp_path: Path) -> None:
    spec = MODELS.get("qwen3_vl")
    config = spec.tiny()[0].config
    stream = list(hf.weight_stream(spec, config, None, 0))[1:]
    with pytest.raises(ValueError, match="every weight once"):
        hf.export(spec, config, stream, tmp_path / "out", dtype=torch.float32)


@pytest.mark.parametrize(
    ("part", "key", "value", "said"),
    [
        ("text_config", "num_key_value_heads", 3, "num_key_value_heads=3: does not divide"),
        ("text_config", "vocab_size", 0, "vocab_size=0: not legal"),
        ("text_config", "hidden_size", -8, "hidden_size=-8: not legal"),
        ("vision_config", "out_hidden_size", 8, "out_hidden_size=8: must be the text model's hidden_size"),
    ],
)
def test_sizes_that_do_not_fit_are_named(part: str, key: str, value: int, said: str) -> None:
    mapping = tiny_mapping("qwen3_vl")
    mapping[part][key] = value
    config = hf.read_config(given(load_from_config=mapping))
    with pytest.raises(UserError, match=said):
        hf.build_meta(MODELS.get("qwen3_vl"), config)


@pytest.mark.parametrize("text", ["[]", "5", "null"])
def test_a_config_file_of_another_kind(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=f"{tmp_path}: no usable config.json"):
        hf.read_config(given(load_from_pretrained_path=str(tmp_path)))
