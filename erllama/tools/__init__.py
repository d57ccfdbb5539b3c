"""Command-line tools for operators: `python -m erllama.tools.kvc`."""

from __future__ import annotations
