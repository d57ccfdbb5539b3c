"""What is wrong with a request, as far as that can be seen without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from erllama.chat.grammar import SchemaGrammars
from erllama.chat.messages import check_messages
from erllama.chat.options import ChatOptions, schema_of
from erllama.chat.prompt import check_together
from erllama.chat.tools import check_tools
from erllama.options import GenerationOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from erllama.chat.messages import Message


class RequestChecks:
    """Looks at requests before a model is loaded for them; schemas are converted once. Any thread."""

    def __init__(self) -> None:
        self._grammars = SchemaGrammars()

    def check(
        self, messages: Sequence[Message] | None, chat: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> None:
        """Raises: `InvalidContent`, `InvalidOption`, `InvalidGrammar`, as the model would."""
        wanted = GenerationOptions(**generation)
        schema = wanted.json_schema
        if messages is not None:
            options = ChatOptions(**chat)
            check_messages(messages)
            tools = check_tools(options.tools, options.tool_choice)
            schema = schema_of(options.response_format, schema)
            check_together(tools, schema, wanted.grammar)
        if schema is not None:
            self._grammars.of(schema)
