"""mkdocs hook: pages that the navigation does not name stand at the end of its section "Inside"."""

from pathlib import Path

SECTION = "Inside"


def _names(nav):
    for entry in nav:
        if isinstance(entry, dict):
            for value in entry.values():
                yield from _names(value if isinstance(value, list) else [value])
        else:
            yield entry


def on_config(config):
    """Called by mkdocs with its configuration."""
    named = set(_names(config.nav))
    pages = sorted(page.name for page in Path(config.docs_dir).glob("*.md") if page.name not in named)
    (inside,) = [entry[SECTION] for entry in config.nav if isinstance(entry, dict) and SECTION in entry]
    inside += pages
    return config
