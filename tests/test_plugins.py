"""A user's own Python: loaded once, under a name of its own, with its hash."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmms_engine.config import Job, load_job
from lmms_engine.config_load import dump_yaml
from lmms_engine.datasets import DATASETS
from lmms_engine.errors import UserError
from lmms_engine.plugins import load_plugins, module_name

WithPlugins = Callable[..., Job]
REGISTERS = """
import lmms_engine.datasets as d

@d.register_dataset("{name}")
class Mine(d.BaseDataset):
    pass
"""


@pytest.fixture
def with_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WithPlugins:
    """with_plugins({file: source}, *names) -> a job whose YAML names these plugins."""
    monkeypatch.chdir(tmp_path)

    def make(files: dict[str, str], *names: str) -> Job:
        recipe = tmp_path / "recipe"
        recipe.mkdir(exist_ok=True)
        for name, source in files.items():
            path = recipe / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        tree = {
            "model_config": {"load_from_pretrained_path": "org/model"},
            "dataset_config": {"datasets": [{"path": "x.jsonl"}]},
            "plugins": list(names),
        }
        (recipe / "config.yaml").write_text(dump_yaml(tree))
        return load_job([recipe / "config.yaml"], [])

    return make


def test_registers_once_and_hashes(with_plugins: WithPlugins) -> None:
    source = REGISTERS.format(name="plugin_test_once")
    job = with_plugins({"mine.py": source}, "./mine.py")
    hashes = load_plugins(job)
    assert hashes == {job.plugins[0]: hashlib.sha256(source.encode()).hexdigest()}
    assert Path(job.plugins[0]).is_absolute()
    assert "plugin_test_once" in DATASETS
    assert load_plugins(job) == hashes, "a second call registers nothing twice"


def test_own_module_names(with_plugins: WithPlugins) -> None:
    """A file called like a library does not replace it, and two files of one name are two modules."""
    import numpy

    job = with_plugins({"numpy.py": "who = 1", "other/numpy.py": "who = 2"}, "./numpy.py", "other/numpy.py")
    load_plugins(job)
    assert sys.modules["numpy"] is numpy
    first, second = (sys.modules[module_name(Path(path))] for path in job.plugins)
    assert (first.who, second.who) == (1, 2)


def test_its_classes_pickle_into_a_process_that_loads_it(with_plugins: WithPlugins, tmp_path: Path) -> None:
    job = with_plugins(
        {"mine.py": "import dataclasses\n\n@dataclasses.dataclass\nclass A:\n    x: int"}, "./mine.py"
    )
    load_plugins(job)
    made = sys.modules[module_name(Path(job.plugins[0]))].A(3)
    (tmp_path / "box").write_bytes(pickle.dumps((job, pickle.dumps(made))))
    code = (
        "import pickle, sys\n"
        "from lmms_engine.plugins import load_plugins\n"
        "job, made = pickle.load(open(sys.argv[1], 'rb'))\n"
        "load_plugins(job)\n"
        "print(pickle.loads(made).x)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "box"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "3"


def test_importable_module(
    with_plugins: WithPlugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_package_of_plugins.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    hashes = load_plugins(with_plugins({}, "my_package_of_plugins"))
    assert hashes == {"my_package_of_plugins": hashlib.sha256(b"x = 1").hexdigest()}


def test_the_same_job_from_the_saved_config(with_plugins: WithPlugins, tmp_path: Path) -> None:
    job = with_plugins({"mine.py": ""}, "./mine.py")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/config.yaml").write_text(job.to_yaml())
    assert load_job([tmp_path / "runs/config.yaml"], []).plugins == job.plugins


@pytest.mark.parametrize(
    ("source", "name", "expected"),
    [
        ("1/0", "./mine.py", "ZeroDivisionError: division by zero"),
        ("import no_such_module_anywhere", "./mine.py", "ModuleNotFoundError"),
        ("def f(:", "./mine.py", "SyntaxError"),
        ("", "no_such_module_anywhere", "ModuleNotFoundError"),
    ],
)
def test_failures_name_the_plugin(with_plugins: WithPlugins, source: str, name: str, expected: str) -> None:
    job = with_plugins({"mine.py": source}, name)
    with pytest.raises(
        UserError, match=rf"plugins\.0=.*{name.removeprefix('./')}: cannot be loaded: {expected}"
    ):
        load_plugins(job)


def test_a_name_that_is_taken(with_plugins: WithPlugins) -> None:
    files = {name: REGISTERS.format(name="plugin_test_taken") for name in ("a.py", "b.py")}
    with pytest.raises(UserError, match=r"plugins\.1=.*'plugin_test_taken' is registered already"):
        load_plugins(with_plugins(files, "./a.py", "./b.py"))
