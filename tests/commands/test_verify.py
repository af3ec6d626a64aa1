"""`verify` on a tiny recipe: equal layouts pass, planted faults fail, what cannot be says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmms_engine.cli import app
from lmms_engine.objectives.next_token import NextToken
from tests.runs import make_config, make_corpus

# Each rank's loss a mean over its own micro-batch, and the step's loss their mean: the usual mistake.
MEANS_OF_MEANS = """
from lmms_engine.objectives.next_token import NextToken

sums = NextToken.forward


def means(self, batch):
    return {"ce": sums(self, batch)["ce"] / float(batch.loss_weights.sum())}


NextToken.forward = means
NextToken.weights = lambda self, batch: {"ce": 1.0}
"""
# A rank of two that fails while the other waits for it.
FAILS_ON_ONE_RANK = """
import os

if (os.environ.get("WORLD_SIZE"), os.environ.get("RANK")) == ("2", "1"):
    from lmms_engine.objectives.next_token import NextToken

    def fail(self, batch):
        raise RuntimeError("planted on one rank")

    NextToken.forward = fail
"""


@pytest.fixture(autouse=True)
def unharmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault is loaded into this process as well: it must not outlive its test."""
    for name in ("forward", "weights"):
        monkeypatch.setattr(NextToken, name, getattr(NextToken, name))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("verify") / "data")


def verify(corpus: Path, out: Path, *cases: str, plugin: str = "") -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed, verify.json."""
    config = make_config(corpus, out / "run")
    out.mkdir(exist_ok=True)
    if plugin:
        (out / "fault.py").write_text(plugin)
        config["plugins"] = ["fault.py"]
    (out / "config.yaml").write_text(json.dumps(config))
    arguments = ["verify", "--config", str(out / "config.yaml"), "--steps", "1", "--out", str(out)]
    for case in cases:
        arguments += ["--only", case]
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output, json.loads((out / "verify.json").read_text())


def test_equal_layouts_pass_and_what_cannot_be_says_why(corpus: Path, tmp_path: Path) -> None:
    code, said, certificate = verify(corpus, tmp_path, "packed", "rows", "fsdp-2", "sp-2", "ep-2", "kernels")
    assert code == 0, said
    assert certificate["passed"]
    results = {result["case"]: result for result in certificate["results"]}
    assert list(results) == ["packed", "rows", "kernels", "fsdp-2", "sp-2", "ep-2"]   # the table's order
    for name in ("packed", "rows", "fsdp-2", "sp-2"):
        assert results[name]["status"] == "ok"
        assert results[name]["loss_difference"] <= 1e-6
        # other orders of adding differ somewhere, or nothing was compared
        assert 0 < results[name]["gradient_difference"] <= 1e-5
        assert results[name]["parameter"].startswith("model.")
    assert results["ep-2"]["status"] == results["kernels"]["status"] == "not run"
    assert "ep_degree=2" in results["ep-2"]["reason"]
    assert certificate["rows"]["rows"] > certificate["rows"]["packs"] > 1
    assert certificate["environment"]["packages"]["torch"]
    text = (tmp_path / "verify.md").read_text()
    assert text.startswith("# Certificate: all equal")
    assert all(name in said and f"| {name} |" in text for name in results)


def test_faults_fail_and_the_cases_after_them_still_run(corpus: Path, tmp_path: Path) -> None:
    plugin = MEANS_OF_MEANS + FAILS_ON_ONE_RANK
    code, said, certificate = verify(corpus, tmp_path, "packed", "fsdp-2", "fsdp-4", plugin=plugin)
    assert code == 1
    assert not certificate["passed"]
    one, two, four = certificate["results"]
    assert [result["status"] for result in (one, two, four)] == ["failed"] * 3
    for result in (one, four):
        assert "differs: loss" in result["reason"]
        assert result["gradient_difference"] > 1e-3
    assert two["reason"].startswith("rank 1: RuntimeError: planted on one rank (fault.py:")
    assert all(f"{name}: failed" in said for name in ("packed", "fsdp-2", "fsdp-4"))
    assert (tmp_path / "verify.md").read_text().startswith("# Certificate: FAILED")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "verify needs --config FILE"),
        (["--only", "fsdp2"], "--only fsdp2: no such case (legal: packed, rows, "),
    ],
)
def test_refusals_are_one_line(corpus: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(make_config(corpus, tmp_path / "run")))
    given = ["--config", str(path), *arguments] if arguments else []
    done = CliRunner().invoke(app, ["verify", *given])
    assert done.exit_code == 1
    assert said in done.output
    assert len(done.output.strip().splitlines()) == 1
