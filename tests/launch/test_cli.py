"""The training command: both forms, what it says when something is wrong, and its exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmms_engine.config_load import dump_yaml
from lmms_engine.errors import Terminated, UserError
from lmms_engine.launch import cli
from lmms_engine.launch.cli import default_output_dir, main, parse

Write = Callable[[str, Any], Path]
GOOD: dict[str, Any] = {
    "model_config": {"load_from_config": {"model_type": "qwen3_vl"}},
    "dataset_config": {
        "datasets": [{"path": "rows.jsonl"}],
        "processor_config": {"processor_type": "qwen3_vl"},
    },
    "trainer_args": {"output_dir": "runs/x", "report_to": "none", "dataloader_num_workers": 0},
    "plugins": ["./plugin.py"],
}
@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, content: Any) -> Path:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else dump_yaml(content))
        return path

    return write


class TestParse:
    @pytest.mark.parametrize(
        ("arguments", "configs", "overrides"),
        [
            (["--config", "a.yaml"], ["a.yaml"], []),
            (
                ["--config", "a.yaml", "--config=b.yaml", "x.y=1", "z=2"],
                ["a.yaml", "b.yaml"],
                ["x.y=1", "z=2"],
            ),
            (["x=1", "--config", "a.yaml", "y=2", "--debug"], ["a.yaml"], ["x=1", "y=2"]),
            (["config_yaml=a.yaml", "x.y=1"], ["a.yaml"], ["x.y=1"]),
            (["x=config_yaml=b", "config_yaml=a=b.yaml"], ["a=b.yaml"], ["x=config_yaml=b"]),
        ],
    )
    def test_both_forms(self, arguments: list[str], configs: list[str], overrides: list[str]) -> None:
        assert parse(arguments) == ([Path(name) for name in configs], overrides)

    @pytest.mark.parametrize("arguments", [[], ["x=1"], ["--confg", "a.yaml"], ["--conf", "a.yaml"]])
    def test_usage(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            parse(arguments)
        assert stopped.value.code == 2
        assert "usage:" in capsys.readouterr().err

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            main(["--help"])
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        assert all(word in text for word in ("--config", "config_yaml=", "key=value", "--debug"))


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        (["recipes/qwen3_vl/config.yaml"], "runs/qwen3_vl-full"),
        (["recipes/mine/config.yaml", "recipes/mine/smoke.yaml"], "runs/mine-smoke"),
        (["recipes/mine/config.yaml", "more.yaml"], "runs/mine-full"),
        (["experiment.yaml"], "runs/experiment"),
    ],
)
def test_default_output_dir(configs: list[str], expected: str) -> None:
    assert default_output_dir([Path(name) for name in configs]) == expected


class TestWrongConfiguration:
    def test_stops_before_anything_heavy_is_imported(self, write: Write) -> None:
        bad = write("a.yaml", {**GOOD, "trainer_args": {"learning_rat": 1e-5, "max_steps": "3"}})
        write("plugin.py", "")
        code = (
            "import sys\n"
            "from lmms_engine.launch.cli import main\n"
            "code = main(sys.argv[1:])\n"
            "heavy = {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules)\n"
            "sys.exit(f'imported: {heavy}' if heavy else code)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code, "--config", bad], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 2
        first, *lines = ran.stderr.splitlines()
        assert first == "error: 2 problems in the configuration:"
        assert any(
            "trainer_args.learning_rat=1e-05: unknown key; did you mean 'learning_rate'?" in line
            for line in lines
        )
        assert any('trainer_args.max_steps="3"' in line for line in lines)
        assert ran.stdout == ""

    @pytest.mark.parametrize("form", [["--config", "a.yaml"], ["config_yaml=a.yaml"]])
    def test_overrides_are_checked(
        self, write: Write, form: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        write("a.yaml", GOOD)
        write("plugin.py", "")
        assert main([*form, "trainer_args.learning_rat=1e-5"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: trainer_args.learning_rat=1e-05: unknown key")
        assert error.count("\n") == 1

    def test_missing_file(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--config", "gone.yaml"]) == 2
        assert capsys.readouterr().err == "error: gone.yaml: cannot be read: No such file or directory\n"

    def test_broken_plugin(self, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
        write("a.yaml", {**GOOD, "plugins": ["./broken.py"]})
        write("broken.py", "1/0")
        assert main(["--config", "a.yaml"]) == 2
        error = capsys.readouterr().err
        assert "broken.py: cannot be loaded: ZeroDivisionError" in error
        assert "Traceback" not in error
        assert main(["--config", "a.yaml", "--debug"]) == 2
        assert "Traceback" in capsys.readouterr().err

    def test_dataset_type_that_nobody_registered(
        self, write: Write, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write("a.yaml", {**GOOD, "plugins": []})
        assert main(["--config", "a.yaml", "dataset_config.dataset_type=vision_iterabel"]) == 2
        error = capsys.readouterr().err
        assert "dataset_config.dataset_type=vision_iterabel: not legal (legal: vision_iterable" in error
        assert "did you mean 'vision_iterable'?" in error

    def test_processor_type_that_nobody_registered(
        self, write: Write, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write("a.yaml", {**GOOD, "plugins": []})
        typo = "dataset_config.processor_config.processor_type=qwen3_v"
        assert main(["--config", "a.yaml", typo]) == 2
        assert f"{typo}: not legal (legal: " in capsys.readouterr().err

    def test_only_rank_0_speaks(
        self, write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write("a.yaml", {"seed": 1})
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert main(["--config", "a.yaml"]) == 2
        assert capsys.readouterr().err == ""


    @pytest.mark.parametrize(
        ("name", "value", "problem"),
        [("WORLD_SIZE", "x", "not whole"), ("RANK", "-1", "not whole"), ("RANK", "1", "no such rank")],
    )
    def test_variables_that_another_program_left(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        name: str,
        value: str,
        problem: str,
    ) -> None:
        monkeypatch.setenv(name, value)
        assert main(["--config", "a.yaml"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{name}={value}" in error
        assert problem in error


class TestEnding:
    """What `main` makes of the way a run ends."""

    @pytest.fixture
    def ended_by(
        self, write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[..., tuple[int, str]]:
        """ended_by(function, *arguments) -> exit code and stderr of a run that is this function."""
        write("a.yaml", GOOD)
        write("plugin.py", "")

        def run(end: Callable[[], None], *arguments: str) -> tuple[int, str]:
            monkeypatch.setattr(cli, "train", lambda *args, **kwargs: end())
            code = main(["--config", "a.yaml", *arguments])
            return code, capsys.readouterr().err

        return run

    @pytest.mark.parametrize(
        ("error", "code", "line"),
        [
            (UserError("mend this"), 1, "error: mend this"),
            (
                OSError(28, "No space left on device"), 1,
                "error: [Errno 28] No space left on device; make room on the disk of runs/x, then a new "
                "start goes on from the last checkpoint",
            ),
            (OSError(5, "Input/output error"), 1, "error: [Errno 5] Input/output error"),
            (
                RuntimeError("two\nlines"),
                1,
                "internal error: RuntimeError: two lines (run again with --debug for the traceback)",
            ),
            (
                KeyboardInterrupt(),
                130,
                "interrupted: a new start goes on from the last checkpoint, if there is one",
            ),
            (Terminated(), 143, ""),
        ],
    )
    @pytest.mark.parametrize("rank", [None, "3"])
    def test_code_and_line(
        self,
        ended_by: Callable[..., tuple[int, str]],
        monkeypatch: pytest.MonkeyPatch,
        error: BaseException,
        code: int,
        line: str,
        rank: str | None,
    ) -> None:
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("WORLD_SIZE", "4")
            line = line and f"[rank {rank}] {line}"

        def end() -> None:
            raise error

        assert ended_by(end) == (code, f"{line}\n" if line else "")

    def test_debug_shows_the_traceback(self, ended_by: Callable[..., tuple[int, str]]) -> None:
        def fails_here() -> None:
            raise RuntimeError("boom")

        code, error = ended_by(fails_here, "--debug")
        assert code == 1
        assert "Traceback" in error
        assert "fails_here" in error

    def test_to_the_end(self, ended_by: Callable[..., tuple[int, str]]) -> None:
        assert ended_by(lambda: None) == (0, "")

    def test_sigterm_while_building(self, ended_by: Callable[..., tuple[int, str]]) -> None:
        before = signal.getsignal(signal.SIGTERM)

        def is_told_to_stop() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
            pytest.fail("SIGTERM was ignored")

        assert ended_by(is_told_to_stop) == (143, "")
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_real_run_that_cannot_start(write: Write, tmp_path: Path) -> None:
    """One process without torchrun, through the runner: one line and exit code 1."""
    tree = {**GOOD, "model_config": {"load_from_pretrained_path": "./no-such-model"}}
    write("plugin.py", "")
    write("rows.jsonl", '{"messages": [{"role": "user", "content": "a"}]}\n')
    ran = subprocess.run(
        [sys.executable, "-m", "lmms_engine.launch.cli", "--config", str(write("a.yaml", tree))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("error: ")
    assert "no-such-model" in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr
    assert "learning_rate: 1.0e-05" in ran.stdout
    assert str(tmp_path / "rows.jsonl") in ran.stdout
