"""Messages of every shape: checked, or `InvalidContent` that names the message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from erllama.chat.messages import KEYS, check_messages
from erllama.errors import InvalidContent
from erllama.types import ChatMessage, ToolCall

USER = {"role": "user", "content": "hello"}
keys = st.one_of(st.sampled_from(sorted(KEYS)), st.integers(), st.just(("x",)), st.none())
values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.sampled_from(["user", "text"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(keys, st.just("text")), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(st.one_of(values, st.dictionaries(keys, values, max_size=4)), max_size=3))
def test_any_messages_are_taken_or_a_typed_error(messages):
    """Nothing but `InvalidContent` comes out."""
    try:
        check_messages(messages)
    except InvalidContent:
        return


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "a", 1: 2, "b": 3}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": ["user"], "content": "a"},
        {"role": "user", "content": "a", ("x",): 1},
        {"role": "assistant", "tool_calls": [{"function": {"name": "\ud800", "arguments": "{}"}}]},
    ],
)
def test_odd_keys_and_values_name_the_message(message):
    """The error has the message's index."""
    with pytest.raises(InvalidContent, match=r"messages\[1\]"):
        check_messages([USER, message])


def test_a_call_made_by_hand_keeps_its_arguments():
    """`arguments` alone are enough."""
    call = ToolCall(id="a", name="f", arguments={"x": "é"})
    made = check_messages([USER, ChatMessage(role="assistant", tool_calls=(call,))])[1]
    assert made["tool_calls"][0]["function"]["arguments"] == '{"x": "é"}'
