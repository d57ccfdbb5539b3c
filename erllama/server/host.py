"""Whether a request was meant for this server. Pure.

A page of the web can have its own name lead to 127.0.0.1 and then ask as if it were at home ("DNS
rebinding").
So a server that listens on this machine only answers to names of this machine only.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .settings import ListenTable

LOCAL = "localhost"


def is_meant(header: str | None, listen: ListenTable) -> bool:
    """Whether a `Host` header names this server; without one it does, and where others may ask too and
    no `hosts` are named.
    """
    if header is None or (not is_local(listen.host) and not listen.hosts):
        return True
    name = _name(header)
    return is_local(name) or name in {_name(host) for host in listen.hosts}


def _name(header: str) -> str:
    """Without the port, in lower case."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0] if name.count(":") == 1 else name


def is_local(name: str) -> bool:
    """Whether a name or an address is of this machine only."""
    if name == LOCAL or name.endswith(f".{LOCAL}"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
