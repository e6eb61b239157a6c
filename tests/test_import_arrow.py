"""The rules that hold for every library file, checked on its syntax tree, and that the wheel holds every one of them.

    parallel <- comm <- layers <- runtime        eplb: numpy and itself (eplb/migrate.py may use comm)

No absolute imports of our own folders, no environment reads outside the launcher and the command lines, no ``global``,
and nothing that unpickles or evaluates what came from a file or another rank.
"""

import ast
import importlib
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "parallel": {"parallel"},
    "comm": {"comm", "parallel"},
    "layers": {"layers", "comm", "parallel"},
    "eplb": {"eplb"},
    "runtime": {"runtime", "layers", "comm", "parallel", "eplb"},
}
EXTRA_IMPORTS = {"eplb/migrate.py": {"comm", "parallel"}}
# What eplb files may import when they are loaded; inside functions they may import more.
EPLB_PACKAGES = {"eplb/migrate.py": {"torch"}, "eplb/plot.py": {"matplotlib"}, "eplb/compiled/": {"numba"}}
READ_ENVIRONMENT = ("parallel/launch.py", "runtime/cli.py", "runtime/verbs/", "eplb/cli.py")
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "bcast",  # mpi4py's lower-case form pickles
}
STANDARD = sys.stdlib_module_names


def library_files():
    return sorted(path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py"))


def problems(name, source):
    """What in the library file ``name`` (relative to the root, with slashes) breaks a rule; one line each."""
    checker = _Checker(name)
    checker.visit(ast.parse(source))
    return [f"{name}:{line}: {text}" for line, text in checker.found]


class _Checker(ast.NodeVisitor):
    def __init__(self, name):
        self.name, self.folder, self.found, self.depth = name, name.split("/")[0], [], 0

    def report(self, node, text):
        self.found.append((node.lineno, text))

    # --- imports

    def visit_Import(self, node):
        for alias in node.names:
            self.absolute(node, alias.name)

    def visit_ImportFrom(self, node):
        if node.level == 0:
            self.absolute(node, node.module)
            if node.module == "os" and {"environ", "getenv", "environb", "putenv"} & {a.name for a in node.names}:
                self.environment(node)
        else:
            package = ["dspark", *self.name.split("/")[:-1]]
            if node.level > len(package):
                return self.report(node, "relative import above the package")
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                self.ours(node, [*base, alias.name])
        for alias in node.names:
            self.forbidden_name(node, alias.name)
            if node.level == 0 and node.module == "torch" and alias.name == "load":
                self.report(node, "import torch and call torch.load(..., weights_only=True)")

    def absolute(self, node, module):
        top = module.split(".")[0]
        if top in MAY_IMPORT or top in ("scripts", "tests"):
            self.report(node, f"absolute import of {module}: other packages have that name; use a relative import")
        elif top == "dspark":
            self.report(node, f"absolute import of {module}; use a relative import")
            self.ours(node, module.split("."))
        elif top in UNPICKLERS:
            self.report(node, f"{top} executes what it reads")
        elif self.folder == "eplb" and self.depth == 0 and top not in STANDARD:
            packages = [names for prefix, names in EPLB_PACKAGES.items() if self.name.startswith(prefix)]
            if top not in {"numpy"}.union(*packages):
                self.report(node, f"eplb must load with numpy only, not {top}")

    def ours(self, node, parts):
        """A dotted path below ``dspark`` must stay in the folders this file may know."""
        allowed = MAY_IMPORT[self.folder] | EXTRA_IMPORTS.get(self.name, set())
        if len(parts) > 1 and parts[1] not in allowed:
            self.report(node, f"{self.folder} must not import {parts[1]}")

    def visit_Constant(self, node):
        if isinstance(node.value, str) and re.fullmatch(r"dspark(\.\w+)+(:\w+)?", node.value):
            self.ours(node, node.value.split(":")[0].split("."))

    # --- everything else

    def visit_FunctionDef(self, node):
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Global(self, node):
        self.report(node, f"global {', '.join(node.names)}")

    def visit_Attribute(self, node):
        owner = node.value.id if isinstance(node.value, ast.Name) else None
        if owner == "os" and node.attr in ("environ", "environb", "getenv", "putenv"):
            self.environment(node)
        self.forbidden_name(node, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node):
        called = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called in ("eval", "exec"):
            self.report(node, f"{called}()")
        if called == "torch.load" and keywords.get("weights_only") != "True":
            self.report(node, "torch.load without weights_only=True")
        for name in ("allow_pickle", "trust_remote_code"):
            if keywords.get(name, "False") != "False":
                self.report(node, name)
        self.generic_visit(node)

    def forbidden_name(self, node, name):
        if name in OBJECT_COLLECTIVES:
            self.report(node, f"{name} pickles; exchange tensors")

    def environment(self, node):
        if not self.name.startswith(READ_ENVIRONMENT):
            self.report(node, "environment read outside the launcher and the command lines")


def test_every_library_file_keeps_the_rules():
    files = library_files()
    assert len(files) > 20
    found = [line for path in files for line in problems(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "name, source, text",
    [
        ("parallel/groups.py", "from ..comm import collectives", "parallel must not import comm"),
        ("parallel/groups.py", "from .. import layers", "parallel must not import layers"),
        ("comm/dispatch/normal.py", "from ...layers.moe import Experts", "comm must not import layers"),
        ("comm/ring.py", "from ..runtime.step import Step", "comm must not import runtime"),
        ("comm/ring.py", "def f():\n    from ..eplb import balance", "comm must not import eplb"),
        ("layers/moe.py", "from ..runtime import step", "layers must not import runtime"),
        ("layers/moe.py", "from ..eplb.placement import Map", "layers must not import eplb"),
        ("layers/moe.py", "TABLE = {'x': 'dspark.runtime.engine:Engine'}", "layers must not import runtime"),
        ("layers/attention/v4.py", "from ....x import y", "above the package"),
        ("eplb/balance.py", "from ..comm import collectives", "eplb must not import comm"),
        ("eplb/balance.py", "import torch", "numpy only, not torch"),
        ("eplb/files.py", "import scipy.stats", "numpy only, not scipy"),
        ("eplb/migrate.py", "from ..layers import moe", "eplb must not import layers"),
        ("runtime/engine.py", "import comm", "absolute import of comm"),
        ("runtime/engine.py", "from layers.moe import x", "absolute import of layers.moe"),
        ("runtime/engine.py", "import dspark.comm", "absolute import of dspark.comm"),
        ("layers/norm.py", "from dspark.runtime import step", "layers must not import runtime"),
        ("runtime/engine.py", "from scripts import demo", "absolute import of scripts"),
        ("runtime/engine.py", "import os\nos.environ['A']", "environment"),
        ("runtime/engine.py", "import os\nos.getenv('A')", "environment"),
        ("layers/norm.py", "from os import environ", "environment"),
        ("parallel/topology.py", "import os\nx = os.environ.get('RANK')", "environment"),
        ("comm/ring.py", "def f():\n    global state\n    state = 1", "global state"),
        ("runtime/engine.py", "import pickle", "pickle executes"),
        ("runtime/engine.py", "from cloudpickle import loads", "cloudpickle executes"),
        ("comm/ring.py", "dist.broadcast_object_list(x)", "broadcast_object_list pickles"),
        ("comm/ring.py", "from torch.distributed import all_gather_object", "all_gather_object pickles"),
        ("parallel/launch.py", "comm.bcast(address)", "bcast pickles"),
        ("runtime/engine.py", "torch.load(f)", "weights_only"),
        ("runtime/engine.py", "torch.load(f, weights_only=False)", "weights_only"),
        ("runtime/engine.py", "from torch import load", "weights_only"),
        ("eplb/files.py", "np.load(f, allow_pickle=True)", "allow_pickle"),
        ("runtime/a.py", "AutoModel.from_pretrained(f, trust_remote_code=True)", "trust_remote_code"),
        ("runtime/engine.py", "eval(text)", "eval()"),
    ],
)
def test_an_offence_is_found(name, source, text):
    found = problems(name, source)
    assert any(text in line for line in found), found


@pytest.mark.parametrize(
    "name, source",
    [
        ("parallel/launch.py", "import os\nos.environ['RANK']"),
        ("runtime/verbs/score.py", "import os\nos.environ.get('COLUMNS')"),
        ("runtime/cli.py", "from os import environ"),
        ("comm/ring.py", "from ..parallel.groups import Group\nfrom . import collectives"),
        ("comm/dispatch/normal.py", "from ..collectives import all_to_all_v\nfrom ...parallel import groups"),
        ("layers/moe.py", "from ..comm import collectives\nimport torch, numpy"),
        ("eplb/migrate.py", "import torch\nfrom ..comm import collectives\nfrom ..parallel.groups import Group"),
        (
            "eplb/files.py",
            "import numpy, json\ndef read():\n    import torch\n    torch.load(f, weights_only=True)",
        ),
        ("runtime/engine.py", "from ..eplb import balance\nfrom ..layers import moe\nfrom .step import Step"),
        ("runtime/model.py", "model.eval()\nos.path.join('a')\nread_json_object(f)\nx = 'the dspark.runtime folder'"),
    ],
)
def test_what_is_allowed_is_not_reported(name, source):
    assert problems(name, source) == []


def test_the_wheel_holds_every_module_and_nothing_else(monkeypatch):
    """What setuptools would put in the wheel, by its own build step, against the files of the tree."""
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    run_setup = importlib.import_module("distutils.core").run_setup
    monkeypatch.chdir(ROOT)
    build = run_setup("setup.py", stop_after="init").get_command_obj("build_py")
    build.ensure_finalized()
    modules = {".".join((package, module)) for package, module, _ in build.find_all_modules()}
    tree = {"dspark." + ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in library_files()}
    assert modules == tree
    shipped = {pathlib.Path(source, name).as_posix() for _, source, _, names in build.data_files for name in names}
    bundled = {path.relative_to(ROOT).as_posix() for path in (ROOT / "runtime/bundled").rglob("*") if path.is_file()}
    assert {pathlib.PurePath(path).as_posix() for path in shipped} >= {
        path for path in bundled if not path.endswith((".py", ".pyc"))
    }
