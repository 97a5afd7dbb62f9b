"""Imports inside the package go downwards only (docs/structures.md)."""

import ast
import re
from pathlib import Path

import pytest

import vllm_ascend_replay

PACKAGE = Path(vllm_ascend_replay.__file__).parent
DOCUMENT = PACKAGE.parent / "docs" / "structures.md"


def floors():
    """``{module or subpackage: floor}`` from the table of the document."""
    found = {}
    for line in DOCUMENT.read_text().splitlines():
        if match := re.match(r"\| (\d) \| (`[^|]*`) \|", line):
            for name in re.findall(r"`(\w+)(?:\.py|/)`", match[2]):
                found[name] = int(match[1])
    return found


def imports(path):
    """Top-level names of the package that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm_ascend_replay"):
            parts = node.module.split(".")[1:]
            yield from parts[:1] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("vllm_ascend_replay."):
                    yield alias.name.split(".")[1]


def home(path):
    """The module or subpackage that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def test_the_table_names_every_module():
    assert set(floors()) == {home(p) for p in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path):
    table, mine = floors(), home(path)
    for name in imports(path):
        if name in (mine, "__version__"):
            continue
        assert table[name] < table[mine], f"{path.name} (floor {table[mine]}) imports {name} (floor {table[name]})"


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("plan.py", r"import (?!numpy|dataclasses|annotations)\w"),
        ("kernels.py", r"import vllm\b|from vllm\b"),
        ("layouts.py", r"import vllm\b|from vllm\b"),
    ],
)
def test_leaves_stay_light(module, forbidden):
    lines = [n for n in (PACKAGE / module).read_text().splitlines() if re.match(r"(import|from) ", n)]
    if module == "plan.py":
        roots = {re.match(r"(?:import|from) (\w+)", n)[1] for n in lines}
        assert roots == {"__future__", "dataclasses", "numpy"}
    else:
        assert not [n for n in lines if re.search(forbidden, n)]


def test_only_the_ascend_host_names_vllm_ascend():
    for path in FILES:
        if home(path) in ("ascend", "cli", "plugin"):
            continue
        assert not re.search(r"(import|from) (vllm_ascend\b|torch_npu)", path.read_text()), path
