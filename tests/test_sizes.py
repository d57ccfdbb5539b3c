"""Sizes as people read and type them."""

from __future__ import annotations

import pytest

from erllama.sizes import parse_bytes, show_bytes


def test_sizes_are_shown_with_a_unit() -> None:
    """Binary units, the largest is GiB."""
    shown = [show_bytes(n) for n in (10, 2048, 3 << 20, 5 << 40)]
    assert shown == ["10 B", "2.0 KiB", "3.0 MiB", "5120.0 GiB"]


def test_sizes_are_read_as_people_type_them() -> None:
    """With and without unit, in any case, with a fraction."""
    read = [parse_bytes(text) for text in ("4096", "1k", "1.5g", "20GiB", "3MB", "0")]
    assert read == [4096, 1024, 3 << 29, 20 << 30, 3 << 20, 0]


@pytest.mark.parametrize("wrong", ["", "x", "-1", "k", "inf", "nan", "1e999"])
def test_what_is_no_size_is_refused(wrong: str) -> None:
    """A ValueError, which argparse turns into its own message."""
    with pytest.raises(ValueError, match=r"float|no size"):
        parse_bytes(wrong)
