"""Which names a server answers to."""

from __future__ import annotations

import pytest

from erllama.server.host import is_meant
from erllama.server.settings import ListenTable


@pytest.mark.parametrize(
    ("host", "hosts", "header", "answers"),
    [
        ("127.0.0.1", (), "localhost:8080", True),
        ("127.0.0.1", (), "evil.example", False),
        ("127.0.0.1", ("box.example",), "box.example:443", True),
        ("0.0.0.0", (), "evil.example", True),
        ("0.0.0.0", ("box.example",), "evil.example", False),
        ("0.0.0.0", ("box.example",), "Box.example", True),
        ("0.0.0.0", ("box.example",), "127.0.0.1:8080", True),
        ("0.0.0.0", ("box.example",), None, True),
    ],
)
def test_names_that_are_answered(host, hosts, header, answers):
    """This machine's own always; any where others may ask, unless `hosts` has some."""
    assert is_meant(header, ListenTable(host=host, hosts=hosts)) is answers
