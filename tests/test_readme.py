"""What the pages say: links lead somewhere, settings are those of the code, figures follow from it."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from vllm_ascend_replay import config
from vllm_ascend_replay.plan import exact_rows

ROOT = Path(__file__).parents[1]
# What stands in docs/ is checked by the build of the site; these pages are not part of it.
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("examples/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    for target in targets:
        assert "://" in target or (page.parent / target).exists(), target


def test_settings_page_names_every_variable_and_its_default():
    text = (ROOT / "docs/settings.md").read_text()
    table = dict(re.findall(r"^\| `(ASCEND_REPLAY\w*)` \| [^|]+ \| (?:`([^`|]+)`|[^|]+) \|", text, re.MULTILINE))
    assert sorted(table) == sorted(config._PARSERS)
    defaults = {field.name: field.default for field in fields(config.ReplaySettings)}
    for variable, (name, parse) in config._PARSERS.items():
        if table[variable]:
            assert parse(variable, table[variable]) == defaults[name], variable
    with pytest.raises(config.SettingError) as error:
        config.read_settings({"ASCEND_REPLAY_KEEP": "full"})
    assert str(error.value) in text


def test_figures_of_the_kept_rows():
    text = (ROOT / "docs/how-it-works.md").read_text()
    exact = exact_rows(19, 128)
    assert exact == 2414
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \(([\d.]+) %\) \| ([\d,]+) \(([\d.]+) %\) \|$", text, re.MULTILINE)
    assert len(rows) == 4
    for prompt, *figures in rows:
        length = int(prompt.replace(",", ""))
        for kept, (rows_kept, share) in zip((128, exact), (figures[:2], figures[2:])):
            assert int(rows_kept.replace(",", "")) == min(kept, length)
            assert float(share) == round(100 * min(kept, length) / length, 1)


def test_the_command_is_cheap_to_import():
    code = (
        "import sys, vllm_ascend_replay.cli; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "[]\n"
