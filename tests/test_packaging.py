"""The bundled model is installed with the package, and the tests are no package of their own."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_the_bundled_model_is_package_data():
    code = (
        "import setuptools, json; setuptools.setup = lambda **kw: print(json.dumps(kw['package_data']));"
        " exec(open('setup.py').read())"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    patterns = json.loads(result.stdout)["dspark.runtime"]
    data = {file for pattern in patterns for file in (ROOT / "runtime").glob(pattern)}
    bundled = {path for path in (ROOT / "runtime" / "bundled").rglob("*") if path.is_file()}
    assert bundled and bundled <= data


def test_tests_are_no_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))
