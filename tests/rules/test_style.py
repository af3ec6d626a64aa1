"""Rules for every Python and shell file."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.shipped import is_own


def untyped(source: str) -> list[str]:
    """Public functions and methods with a parameter or result that has no annotation."""
    found: list[str] = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                visit(node.body, f"{prefix}{node.name}.")
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_") and node.name not in ("__init__", "__call__"):
                continue
            given = node.args
            parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            parameters += [extra for extra in (given.vararg, given.kwarg) if extra]
            if prefix and not any(ast.unparse(d) == "staticmethod" for d in node.decorator_list):
                parameters = parameters[1:]  # self or cls
            missing = [parameter.arg for parameter in parameters if parameter.annotation is None]
            if node.returns is None:
                missing.append("return")
            if missing:
                found.append(f"{node.lineno}: {prefix}{node.name}: {', '.join(missing)}")

    visit(ast.parse(source).body, "")
    return found


def sources(repo: Path) -> list[Path]:
    folders = ("lmms_engine", "data_prep", "recipes", "tools")
    found = sorted(path for folder in folders for path in (repo / folder).rglob("*.py"))
    return [path for path in found if not is_own(path.relative_to(repo))]


def test_public_functions_are_typed(repo: Path) -> None:
    found = [
        f"{path.relative_to(repo)}:{line}" for path in sources(repo) for line in untyped(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_the_typing_rule_sees() -> None:
    assert untyped("def f(a) -> None: ...") == ["1: f: a"]
    assert untyped("class A:\n    def f(self, *a: int): ...") == ["2: A.f: return"]
    assert not untyped("def _f(a): ...\nclass A:\n    @staticmethod\n    def f(a: int) -> int: ...")


def test_no_bare_except(repo: Path) -> None:
    found = [
        f"{path.relative_to(repo)}:{node.lineno}"
        for path in [*sources(repo), *sorted((repo / "tests").rglob("*.py"))]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not found, "\n".join(found)


def test_shell_scripts(repo: Path, files: list[Path]) -> None:
    scripts = [path for path in files if path.suffix in (".sh", ".sbatch") or path == Path(".ci/run")]
    assert {Path(".ci/run"), Path("tools/setup.sh")} <= set(scripts)
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert checker, "shellcheck is in the lock"
    checked = subprocess.run(
        [checker, *map(str, scripts)], cwd=repo, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout
    for script in scripts:
        assert (repo / script).stat().st_mode & 0o111, f"{script} is not executable"


def test_no_private_names(repo: Path, files: list[Path]) -> None:
    """No package registry's host name and no path of the machine that a file was written on."""
    # In pieces, so that this file does not name them.
    hosts = [
        "pypi" + ".org",
        "python" + "hosted.org",
        "download.py" + "torch.org",
        "registry.npm" + "js.org",
        "deb." + "debian.org",
        "archive." + "ubuntu.com",
        "conda." + "anaconda.org",
    ]
    paths = ["/wo" + "rk/", "/ro" + "ot/", "/opt/" + "wheels", "/home/" + "runner"]
    found = []
    for path in files:
        try:
            text = (repo / path).read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path}: {name}" for name in (*hosts, *paths) if name in text]
    assert not found, "\n".join(found)
