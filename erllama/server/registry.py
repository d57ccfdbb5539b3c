"""From the names that clients write to files of models.

`Resolver` is the seam: a registry that pulls models is one more of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from erllama import models
from erllama.errors import InvalidConfig, ModelNotFound

from .settings import ModelTable, check_name, home_expanded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .settings import Settings

LATEST = ":latest"
DEFAULT_NAME = "smollm2"


@dataclass(frozen=True, slots=True)
class Spec:
    """One model that can be served: its name, its options, and how its file is found (blocking or not)."""

    name: str
    table: ModelTable

    async def find_file(self, progress: Callable[[float], None]) -> Path:
        """Where it lies; the default model is fetched. Raises: `FetchFailed`, `InvalidConfig`."""
        if self.table.path is None:
            return await models.default_model_async(progress)
        return Path(self.table.path)

    @property
    def file(self) -> Path | None:
        """Where it lies, or will lie once it is fetched."""
        if self.table.path is None:
            return models.models_dir() / models.SMOLLM2_135M.file
        return Path(self.table.path)

    @property
    def concurrency(self) -> int:
        """Requests that run at once: the sequences its context has."""
        return self.table.context_options().n_seq_max

    @property
    def n_ctx(self) -> int | None:
        """The context length it is loaded with; None: its own."""
        return self.table.context_options().n_ctx


class Resolver(Protocol):
    """From a name to a model."""

    def resolve(self, name: str) -> Spec:
        """Raises: `ModelNotFound`."""
        ...

    def specs(self) -> list[Spec]:
        """All models, by name."""
        ...


class ConfiguredModels:
    """The models of the settings; without any, the small default model."""

    def __init__(self, settings: Settings) -> None:
        tables = settings.models or {DEFAULT_NAME: ModelTable()}
        self._specs = {name: Spec(name, table) for name, table in tables.items()}
        self._aliases: Mapping[str, str] = {}
        self.set_aliases(settings.aliases)

    def set_aliases(self, aliases: Mapping[str, str]) -> None:
        """Replace the aliases at once. Raises: `InvalidConfig` for one that leads nowhere, or is a model."""
        for alias, name in aliases.items():
            if alias in self._specs:
                raise InvalidConfig(f"aliases.{alias}: a model has this name")
            if name not in self._specs:
                raise InvalidConfig(f"aliases.{alias}={name!r}: there is no such model")
        self._aliases = dict(aliases)

    def resolve(self, name: str) -> Spec:
        """By name, alias, or either with `:latest`; names are looked up and never become paths."""
        for asked in (name, name.removesuffix(LATEST)):
            spec = self._specs.get(self._aliases.get(asked, asked))
            if spec is not None:
                return spec
        known = [*self._specs, *self._aliases]
        raise ModelNotFound(
            f"there is no model {name[:256]!r}; ask for one of: {', '.join(known)}",
            detail={"model": name, "known": known},
        )

    def specs(self) -> list[Spec]:
        """All models, by name."""
        return [self._specs[name] for name in sorted(self._specs)]


def table_from_argument(text: str) -> tuple[str, ModelTable]:
    """`NAME=PATH`, or `PATH` with the file's stem as name. Raises: `InvalidConfig`."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name:
        name, path = Path(text).stem, text
    if not path:
        raise InvalidConfig(f"{text!r}: expected NAME=PATH or PATH of a GGUF file")
    return check_name(name), ModelTable(path=str(home_expanded(path)))
