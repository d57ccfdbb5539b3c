"""What a server is told: a frozen, checked record, made from keyword arguments or a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from erllama.errors import InvalidConfig, InvalidOption, MissingConfig, UnknownOption
from erllama.options import ContextOptions, ModelOptions

LOOPBACK = "127.0.0.1"
N_SEQ_MAX = 4
N_CTX = 4096
MIB = 1 << 20
GIB = 1 << 30


class _Table(BaseModel):
    """A table of the file: no unknown keys, nothing changes afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelTable(_Table):
    """One model. `path` may be left out for the small default model.

    `context` and `load` are fields of `ContextOptions` and `ModelOptions`; `exact`, `deterministic` as
    `load_model` takes them. `embeddings`: whether it is opened to embed; None: if its file says so.
    `embedding_dimensions`: lengths that its vectors were trained to be cut to. `lazy_tool_grammar` as `chat`
    takes it.
    """

    path: str | None = None
    context: Mapping[str, Any] = {}
    load: Mapping[str, Any] = {}
    chat_template_file: str | None = None
    exact: Literal["session", "cold"] = "session"
    deterministic: bool = False
    lazy_tool_grammar: bool = True
    embeddings: bool | None = None
    embedding_dimensions: tuple[Annotated[int, Field(ge=1)], ...] = ()
    keep_alive_s: float | None = None
    queue_depth: int | None = Field(default=None, ge=0)
    queue_timeout_s: float | None = Field(default=None, gt=0)

    def context_options(self, **defaults: Any) -> ContextOptions:
        """With these defaults, else the server's. Raises: `UnknownOption`, `InvalidOption`."""
        made = {"n_ctx": N_CTX, "n_seq_max": N_SEQ_MAX, **defaults, **self.context}
        if self.embeddings is not None:
            made["embeddings"] = self.embeddings
        return ContextOptions(**made)

    @property
    def wants_embeddings(self) -> bool | None:
        """What the settings say; None if nothing."""
        return self.context.get("embeddings") if self.embeddings is None else self.embeddings

    def model_options(self) -> ModelOptions:
        """Raises: `UnknownOption`, `InvalidOption`."""
        return ModelOptions(**self.load)


class ListenTable(_Table):
    """Where the server listens. `hosts`: names besides those of this machine that clients may use for it."""

    host: str = LOOPBACK
    hosts: tuple[str, ...] = ()
    port: int = Field(default=8080, ge=0, le=65535)


class AuthTable(_Table):
    """API keys that each surface takes; none: it is open. `thinking_signing_key` signs blocks of thinking."""

    openai: tuple[str, ...] = Field(default=(), repr=False)
    anthropic: tuple[str, ...] = Field(default=(), repr=False)
    ollama: tuple[str, ...] = Field(default=(), repr=False)
    thinking_signing_key: str = Field(default="", repr=False)


class CorsTable(_Table):
    """Origins whose pages may use the server; none: no CORS headers at all."""

    origins: tuple[str, ...] = ()
    max_age_s: int = Field(default=600, ge=0)


class LimitsTable(_Table):
    """Sizes and times at which a request is refused or ended. 0 seconds is no limit for none of them."""

    max_request_body_bytes: int = Field(default=MIB, ge=1)
    max_messages: int = Field(default=1024, ge=1)
    max_tools: int = Field(default=128, ge=0)
    max_embedding_inputs: int = Field(default=256, ge=1)
    max_kept_conversations_bytes: int = Field(default=256 * MIB, ge=0)
    engine_call_s: float = Field(default=120, gt=0)
    prefill_s: float = Field(default=300, gt=0)
    generation_idle_s: float = Field(default=60, gt=0)
    total_s: float = Field(default=1800, gt=0)
    slow_client_s: float = Field(default=60, gt=0)
    idle_connection_s: float = Field(default=1800, gt=0)
    drain_s: float = Field(default=5, ge=0)
    ping_s: float = Field(default=5, gt=0)


class CacheTable(_Table):
    """Who shares KV with whom, and for how long it is kept.

    `api_keys`: "separate" users: what was asked under one is not reused under another; or they "share".
    `prompt_cache_key`: it "names" a session, or also "separates" as an API key does.
    `ttl_s`: KV goes that long after it was saved, however often it is used; None: when room is needed.
    """

    api_keys: Literal["separate", "share"] = "separate"
    prompt_cache_key: Literal["names", "separates"] = "names"
    ttl_s: float | None = Field(default=None, gt=0)


class QueueTable(_Table):
    """How many requests of one model wait, and for how long."""

    depth: int = Field(default=100, ge=0)
    timeout_s: float = Field(default=30, gt=0)


class Settings(_Table):
    """Everything a server is told.

    `keep_alive_s`: how long a model without requests stays loaded; below 0, for ever. `memory_aware_loading`:
    where a model would not fit, idle ones make room; `model_load_memory_margin` bytes stay free.
    `session_busy`: what a second request of a session gets while the first one runs: a refusal, or to run
    without the session. `fit_history`: a chat that is too long loses its oldest turns. `stable_prompts`:
    changing lines at the head of prompts are moved.
    """

    listen: ListenTable = ListenTable()
    auth: AuthTable = AuthTable()
    cors: CorsTable = CorsTable()
    limits: LimitsTable = LimitsTable()
    queue: QueueTable = QueueTable()
    cache: CacheTable = CacheTable()
    models: Mapping[str, ModelTable] = {}
    aliases: Mapping[str, str] = {}
    keep_alive_s: float = 300
    memory_aware_loading: bool = False
    model_load_memory_margin: int = Field(default=GIB, ge=0)
    session_busy: Literal["refuse", "share"] = "refuse"
    fit_history: bool = True
    stable_prompts: bool = True
    request_id_header: str = Field(default="x-request-id", pattern=r"^[A-Za-z0-9-]{1,64}$")


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Settings from plain values, models' options checked too. Raises: `InvalidConfig` naming the key."""
    try:
        settings = Settings.model_validate(values)
    except ValidationError as why:
        raise _invalid(why) from None
    for name, table in settings.models.items():
        check_name(name)
        try:
            table.context_options()
            table.model_options()
        except (InvalidOption, UnknownOption) as why:
            raise InvalidConfig(f"models.{name}: {why}", detail=why.detail) from None
    for alias, name in settings.aliases.items():
        check_name(alias)
        if alias in settings.models:
            raise InvalidConfig(f"aliases.{alias}: a model has this name", detail={"key": f"aliases.{alias}"})
        if name not in settings.models and settings.models:
            raise InvalidConfig(
                f"aliases.{alias}={name!r}: there is no such model", detail={"key": f"aliases.{alias}"}
            )
    return settings


def read_file(path: str) -> dict[str, Any]:
    """A TOML file's values; paths of models are relative to the file.

    Raises: `MissingConfig`, `InvalidConfig`.
    """
    file = home_expanded(path)
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as why:
        raise MissingConfig(f"cannot read {path}: {why.strerror}", detail={"path": path}) from None
    except ValueError as why:  # not UTF-8, not TOML
        raise InvalidConfig(f"{path} is not TOML: {why}", detail={"path": path}) from None
    except RecursionError:
        raise InvalidConfig(f"{path} is nested too deeply", detail={"path": path}) from None
    for table in table_of(values, "models").values():
        for key in ("path", "chat_template_file"):
            if isinstance(table, dict) and isinstance(table.get(key), str):
                table[key] = str(file.parent / home_expanded(table[key]))
    return values


def home_expanded(path: str) -> Path:
    """A path whose `~` or `~user` is a home folder. Raises: `InvalidConfig` where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as why:
        raise InvalidConfig(f"{path}: {why}", detail={"path": path}) from None


def table_of(values: Mapping[str, Any], key: str, under: str = "") -> dict[str, Any]:
    """A table of a file, empty if it is not there. Raises: `InvalidConfig` for anything else of that name."""
    table = values.get(key, {})
    if not isinstance(table, dict):
        raise InvalidConfig(f"{under}{key}: expected a table", detail={"key": f"{under}{key}"})
    return dict(table)


def check_name(name: str) -> str:
    """A name of a model, as clients write it. Raises: `InvalidConfig`."""
    if not 0 < len(name) <= 256 or not name.isprintable() or name != name.strip():
        raise InvalidConfig(f"{name!r} is no name for a model", detail={"key": "models", "value": name})
    return name


# What pydantic complains about, as a file has it.
EXPECTED = {
    "string_type": "a text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "mapping_type": "a table",
    "dict_type": "a table",
    "model_type": "a table",
}


def _complaint(kind: str, place: tuple[int | str, ...], message: str) -> str:
    if kind == "extra_forbidden":
        return "there is no such setting"
    if kind == "tuple_type":
        return f"expected a list of {'whole numbers' if place[-1] == 'embedding_dimensions' else 'texts'}"
    if kind in EXPECTED:
        return f"expected {EXPECTED[kind]}"
    return message.removeprefix("Input ")


def _invalid(why: ValidationError) -> InvalidConfig:
    first = why.errors(include_url=False, include_context=False)[0]
    key = ".".join(map(str, first["loc"]))
    message = _complaint(first["type"], first["loc"], first["msg"])
    is_secret = first["loc"][:1] == ("auth",)  # and errors are logged
    return InvalidConfig(
        f"{key}: {message}", detail={"key": key} if is_secret else {"key": key, "value": first["input"]}
    )
