"""The pages say what the code says, and their links lead somewhere."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])


@pytest.fixture(scope="module")
def build_reference():
    spec = importlib.util.spec_from_file_location("build_reference", ROOT / "docs" / "build_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_is_up_to_date(build_reference):
    assert build_reference.PAGE.read_text() == build_reference.render(), "`make docs` writes it anew"


def test_docstring_becomes_markdown(build_reference):
    docstring = "Sum.\n\nArgs:\n  first: one\n    goes on.\n  second: two.\n\nReturns:\n  A number.\n\nAfter."
    expected = "Sum.\n\n**Args**\n\n- `first`: one goes on.\n- `second`: two.\n\n**Returns**\n\nA number.\n\nAfter."
    assert build_reference.to_markdown(docstring) == expected


def headings(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        destination = (page.parent / path) if path else page
        assert destination.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in headings(destination), f"{destination.name} has no heading {anchor}"


def test_readme_examples_run_and_explain_prints_what_it_shows(capsys, monkeypatch):
    """The examples run one after the other, as a reader would type them, as on a CPU."""
    monkeypatch.setenv("JAX_FA4_TARGET", "cpu")
    readme = (ROOT / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(examples) == 5
    namespace = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), namespace)
    assert np.isfinite(namespace["loss"])
    assert np.isfinite(namespace["grad_query"]).all()
    shown = readme.partition(examples[-1] + "```\n\n```\n")[2].partition("```")[0]
    assert capsys.readouterr().out == shown
