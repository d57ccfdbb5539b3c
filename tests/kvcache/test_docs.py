"""What the store's documents say is true: examples run, tables equal the code."""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from erllama.kvcache.header import HEADER_BYTES
from erllama.kvcache.kinds import PartKind, SaveReason
from erllama.kvcache.policy import SavePolicy
from erllama.tools.kvc import parser

from .test_codec import GOLDEN

DOCS = pathlib.Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "guides" / "caching.md").read_text()
FORMAT = (DOCS / "internals" / "file-format.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("code", [code for code in blocks(GUIDE, "python") if "open_store" in code])
def test_the_guide_s_examples_run(code: str, tmp_path: pathlib.Path) -> None:
    """T9: what the caching guide does with a store alone, in an empty folder."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "kv disk 0 of" in done.stdout


def test_the_guide_s_policy_table_is_the_policy() -> None:
    """M16: names and defaults of `SavePolicy`."""
    section = GUIDE[GUIDE.index("## What is saved at all") : GUIDE.index("## When something breaks")]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section, re.MULTILINE))
    policy = SavePolicy()
    fields = set(policy.__dataclass_fields__)  # type: ignore[attr-defined]
    assert set(rows) == fields
    for name, shown in rows.items():
        assert shown.replace(",", "") == str(getattr(policy, name))


def test_the_guide_s_commands_exist() -> None:
    """Every `kvc` line of the guide parses."""
    lines = re.findall(r"^python -m erllama\.tools\.kvc ([^#\n]+)", GUIDE, re.MULTILINE)
    assert len(lines) == 9
    for line in lines:
        parser().parse_args(shlex.split(line))


def test_the_format_page_s_example_is_the_golden_header() -> None:
    """The bytes printed in the format page are those of the golden test; its numbers are the code's."""
    example = next(block for block in blocks(FORMAT, "") if block.startswith("4b 56 43"))
    assert bytes.fromhex(example) == GOLDEN
    assert len(GOLDEN) == HEADER_BYTES - 4
    for reason in SaveReason:
        assert f"{reason.name.lower()} {reason.value}" in FORMAT
    for kind in PartKind:
        assert f"{kind.name.lower()} {kind.value}" in FORMAT
