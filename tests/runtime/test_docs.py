"""The examples in README and docs run, and print what the README says."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def blocks(path):
    """The indented blocks under "From Python", in order."""
    found, current = [], []
    section = (ROOT / path).read_text().split("\n## From Python\n")[1].split("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("    "):
            current.append(line[4:])
        elif line.strip() and current:
            found.append("\n".join(current).rstrip())
            current = []
        elif current:
            current.append("")
    return found + (["\n".join(current).rstrip()] if current else [])


def test_the_readme_prints_what_it_says(capsys):
    code, printed = blocks("README.md")
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == printed.splitlines()


def test_the_usage_example_runs(capsys):
    exec(compile(blocks("docs/usage.md")[0], "docs/usage.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("0 length (") and lines[1].startswith("1 ")


PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", PAGES)
def test_files_that_are_named_exist(path):
    text = (ROOT / path).read_text()
    named = set(re.findall(r"`((?:docs|scripts|comm|layers|parallel|eplb|runtime|tests)/[\w./-]+\.\w+)`", text))
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing


def test_every_page_is_named_in_the_readme():
    text = (ROOT / "README.md").read_text()
    assert [page for page in PAGES[1:] if page not in text] == []
