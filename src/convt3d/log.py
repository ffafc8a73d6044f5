"""Messages of the package: the logger ``convt3d``, shown when CONVT3D_LOG names a level."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("convt3d")
_said: set[str] = set()


def log_once(message: str) -> None:
    """Log ``message`` at level INFO the first time it is given."""
    if message not in _said:
        _said.add(message)
        logger.info(message)


def _configure(level: str) -> None:
    """Print from ``level`` up on stderr; an unknown level means INFO."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("convt3d: %(message)s"))
    logger.addHandler(handler)
    number = logging.getLevelName(level.upper())
    logger.setLevel(number if isinstance(number, int) else logging.INFO)


if os.environ.get("CONVT3D_LOG"):
    _configure(os.environ["CONVT3D_LOG"])
