"""A scripted model that speaks any of upstream's templates."""

from __future__ import annotations

from dataclasses import dataclass

from chat.scenes import FOLDER

from erllama import llama
from erllama.testing import FakeBackend


@dataclass(eq=False)
class ScriptedChat(FakeBackend):
    """A FakeBackend with a template: `template` names one of upstream's, `says` is its every answer."""

    template: str = "Qwen-Qwen3-0.6B"
    says: str = "Hello."
    n_templates: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.n_ctx = max(self.n_ctx, 16384)
        self.prompts: list[str] = []
        self.params: list[object] = []
        self.script = self._answer

    def _answer(self, prompt: str) -> list[int]:
        self.prompts.append(prompt)
        return list(self.says.encode())

    def new_sampler(self, params):
        """Any grammar will do: the script keeps to it."""
        self.params.append(params)
        return super().new_sampler(_without_grammar(params))

    def chat_templates(self, text: str | None) -> llama.ChatTemplates:
        """See `erllama.backend.OptionalBackend`."""
        self.n_templates += 1
        return llama.ChatTemplates.of_text(text or (FOLDER / f"{self.template}.jinja").read_text())

    def special_texts(self) -> list[tuple[int, str, bool]]:
        """The one it has."""
        return [(257, "<control>", True)]


def _without_grammar(params):
    import dataclasses

    return dataclasses.replace(params, grammar=None)
