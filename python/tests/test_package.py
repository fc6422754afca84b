"""What pip has installed: programs, types, and an import that needs no torch."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rejoin
from rejoin import _native

HERE = Path(rejoin.__file__).parent


@pytest.mark.parametrize("name", ["rejoin", "rejoind", "rejoin-run"])
def test_the_programs_are_there(name):
    done = subprocess.run([Path(sys.executable).parent / name, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split()[-1] == rejoin.__version__, done


def test_torch_is_not_needed():
    script = "import sys; sys.modules['torch'] = None; import rejoin, rejoin.run, rejoin.log; rejoin.log.to_logging()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["rejoin.torch", "rejoin.distributed"])
def test_where_there_is_no_torch_it_is_said_what_to_install(module):
    script = f"import sys; sys.meta_path.insert(0, Hidden()); import {module}"
    hidden = (
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
    )
    done = subprocess.run([sys.executable, "-c", hidden + script], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install torch" in done.stderr, done.stderr


def test_mypy_takes_the_package_as_typed():
    assert (HERE / "py.typed").exists()


def arguments(function: ast.FunctionDef) -> tuple[list[str], int]:
    """Names, and how many of them have defaults."""
    return [a.arg for a in function.args.posonlyargs + function.args.args], len(function.args.defaults)


def test_the_stub_has_what_the_module_has():
    """mypy's own stubtest does not know nanobind's functions."""
    stub = ast.parse((HERE / "_native.pyi").read_text())

    def check(of: object, name: str, body: list[ast.stmt]) -> None:
        told = {f.name: arguments(f) for f in body if isinstance(f, ast.FunctionDef)}
        there = {}
        for function, value in vars(of).items():
            if hasattr(value, "__nb_signature__"):
                text = re.sub(r"\\\d+", "0", value.__nb_signature__[0][0]).split(" -> ")[0]
                parsed = ast.parse(text + ": ...").body[0]
                assert isinstance(parsed, ast.FunctionDef)
                there[function] = arguments(parsed)
        assert there and told.keys() >= there.keys(), f"{name}: {told.keys() ^ there.keys()}"
        for function, (names, defaults) in there.items():
            assert (len(told[function][0]), told[function][1]) == (len(names), defaults), f"{name}.{function}"
            named = [n for n in names if not n.startswith("arg")]  # where the module has names, callers use them
            assert all(n in told[function][0] for n in named), f"{name}.{function}: {told[function][0]} and {names}"
        assert {f for f in told if not f.startswith("__")} <= there.keys(), f"{name}: the stub has more"

    check(_native, "_native", stub.body)
    for one in stub.body:
        if isinstance(one, ast.ClassDef):
            check(getattr(_native, one.name), one.name, one.body)


def test_a_package_that_is_not_whole_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "rejoin._native", None)
    with pytest.raises(ImportError, match="pip install --force-reinstall"):
        importlib.reload(rejoin)
