"""Hook of mkdocs: pages whose text stands outside of docs/, where its readers look for it."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "changes.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "emulator.md": "tests/emulator/README.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages; links into docs/ and between them are those of the site."""
    links = {source: page for page, source in PAGES.items()}
    for page, source in PAGES.items():
        text = re.sub(
            r"\]\(([^)#]+)",
            lambda m: f"]({_target(m.group(1), links)}",
            (ROOT / source).read_text(),
        )
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """The sdist has no records: there a link to one is its text."""
    if (ROOT / "docs" / "results").is_dir():
        return markdown
    return re.sub(r"\[([^]]+)\]\(results/[^)]+\)", r"\1", markdown)


def _target(link: str, links: dict[str, str]) -> str:
    return links.get(link, link.removeprefix("docs/"))
