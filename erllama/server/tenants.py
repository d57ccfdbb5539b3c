"""Whose cache a request uses: what separates the users of one server. Pure.

A salt is a hash of an API key, or of a `prompt_cache_key` under one. Requests with different salts share no
KV, and session ids are names within a salt, so none of them can tell from times or counts what another one
has asked.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .generation import Ask
    from .settings import CacheTable

SALT_BYTES = 16


def salt_of(text: str, under: bytes = b"") -> bytes:
    """The salt of an API key; with `under`, of something that only counts below another salt."""
    named = b"erllama" + bytes((len(under),)) + under  # BLAKE2's key is at most 64 bytes
    return hashlib.blake2b(text.encode(), digest_size=SALT_BYTES, key=named).digest()


def of_tenant(ask: Ask, salt: bytes, table: CacheTable) -> Ask:
    """The ask as one of its user. `salt`: its API key's."""
    if table.prompt_cache_key == "separates" and ask.cache_key:
        salt = salt_of(ask.cache_key, under=salt)
    return dataclasses.replace(ask, salt=salt) if salt else ask
