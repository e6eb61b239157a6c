"""The shape of the code base: which folder may import which, and that an installed package holds every module."""

import ast
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("parallel", "comm", "layers", "eplb", "runtime")
# parallel <- comm <- layers <- runtime. The balancer needs only numpy; its weight exchange alone communicates.
ALLOWED = {
    "parallel": set(),
    "comm": {"parallel"},
    "layers": {"parallel", "comm"},
    "eplb": set(),
    "runtime": {"parallel", "comm", "layers", "eplb"},
}
EXCEPTIONS = {"eplb/migrate.py": {"comm", "parallel"}}
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imported(path):
    """(line, dotted target) of every import; relative ones as they are called inside ``dspark``."""
    package = ("dspark", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            yield node.lineno, ".".join(part for part in (base, node.module) if part)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrow(path):
    name = str(path.relative_to(ROOT))
    folder = name.split("/")[0]
    allowed = ALLOWED[folder] | {folder} | EXCEPTIONS.get(name, set())
    for line, target in imported(path):
        first, *rest = target.split(".")
        assert first not in FOLDERS, f"{name}:{line} imports {target}, which is only dspark.{target}"
        if first == "dspark":
            assert rest and rest[0] in allowed, f"{name}:{line}: {folder} must not import {target}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_executable_is_read_or_sent(path):
    """No pickle, no collective of Python objects, no torch.load without weights_only=True."""
    name = str(path.relative_to(ROOT))
    for _, target in imported(path):
        assert target.split(".")[0] not in ("pickle", "cloudpickle", "dill", "marshal", "shelve"), name
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        where, called = f"{name}:{node.lineno}", node.func.attr
        assert not called.endswith(("_object", "_object_list")), f"{where} sends Python objects"
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        if called == "load" and owner == "torch":
            safe = [k for k in node.keywords if k.arg == "weights_only" and getattr(k.value, "value", None) is True]
            assert safe, f"{where}: torch.load without weights_only=True"
        if called == "load" and owner in ("np", "numpy"):
            unsafe = [k for k in node.keywords if k.arg == "allow_pickle" and getattr(k.value, "value", None) is True]
            assert not unsafe, f"{where}: numpy.load with allow_pickle"


def test_the_package_lists_every_module_and_the_bundled_model():
    code = (
        "import setuptools, json; setuptools.setup = lambda **kw: print(json.dumps([kw['packages'], kw['package_dir'],"
        " kw['package_data']])); exec(open('setup.py').read())"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    packages, package_dir, package_data = json.loads(result.stdout)
    for path in MODULES:
        folder = path.relative_to(ROOT).parent
        assert ".".join(("dspark", *folder.parts)) in packages, f"{folder} is not installed: has it an __init__.py?"
    assert package_dir == {f"dspark.{folder}": folder for folder in FOLDERS}
    data = {file for pattern in package_data["dspark.runtime"] for file in (ROOT / "runtime").glob(pattern)}
    bundled = {path for path in (ROOT / "runtime" / "bundled").rglob("*") if path.is_file()}
    assert bundled and bundled <= data


def test_tests_are_no_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))
