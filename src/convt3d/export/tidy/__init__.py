"""Kernel text that a person can read: what the kernels of one file need, and nothing else.

The package's kernels serve every layer, arithmetic and layout. Here the preprocessor and the
constants of one plan are evaluated, and what nothing reaches is removed, step by step; a step
stays where NVRTC makes the same PTX of the text. Needs the extra ``tidy`` and no GPU.
"""

from __future__ import annotations

from convt3d.export.tidy.chunks import NAMESPACE
from convt3d.export.tidy.text import Program, Tidied, tidied

__all__ = ["NAMESPACE", "Program", "Tidied", "tidied"]
