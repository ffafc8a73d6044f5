"""Hook of hatchling: the README as a package index shows it, which has no repository beside it.

Relative links and images become absolute, at the tag of the version in the repository that
[project.urls] of pyproject.toml names as Repository. Without one, links become their text, and
images are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface as Hook
except ImportError:  # only builds have hatchling
    Hook = object

LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)\s]+)\)")


class ReadmeHook(Hook):
    """Fills in ``readme``, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text()
        urls = {name.lower(): url for name, url in metadata.get("urls", {}).items()}
        text = on_index(text, urls.get("repository"), metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def on_index(text: str, repository: str | None, version: str) -> str:
    """The text with links that lead somewhere from everywhere."""

    def absolute(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match.group()
        if repository is None:
            return "" if image else words
        kind = "raw" if image else "blob"
        return f"{image}[{words}]({repository.rstrip('/')}/{kind}/v{version}/{target})"

    return LINK.sub(absolute, text)
