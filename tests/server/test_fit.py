"""Which turns of a conversation that is too long are left out."""

from __future__ import annotations

from erllama.server.fit import without_oldest

HEAD = {"role": "system", "content": "Be kind."}
LATE = {"role": "system", "content": "Be short."}


def said(role, text, **more):
    return {"role": role, "content": text * 50, **more}


def exchange(number):
    call = {"id": str(number), "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [
        said("user", f"u{number}"),
        said("assistant", "", tool_calls=[call]),
        said("tool", f"r{number}", tool_call_id=str(number)),
        said("assistant", f"a{number}"),
    ]


def test_whole_exchanges_go_and_the_oldest_first():
    """Never a call without its result; the head and the last exchange stay."""
    messages = [HEAD, *exchange(1), *exchange(2), *exchange(3)]
    assert without_oldest(messages, n_prompt=100, n_wanted=70) == [HEAD, *exchange(2), *exchange(3)]
    assert without_oldest(messages, n_prompt=100, n_wanted=1) == [HEAD, *exchange(3)]


def test_system_messages_stay_where_they_are():
    """Also one that was said in an exchange that goes."""
    messages = [HEAD, *exchange(1), LATE, *exchange(2), LATE]
    assert without_oldest(messages, n_prompt=100, n_wanted=60) == [HEAD, LATE, *exchange(2), LATE]


def test_the_last_exchange_is_never_cut():
    """None: there is nothing to leave out."""
    assert without_oldest([HEAD, *exchange(1)], n_prompt=100, n_wanted=1) is None
    assert without_oldest([said("assistant", "a"), said("tool", "t")], n_prompt=100, n_wanted=1) is None
