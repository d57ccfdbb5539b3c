"""Engine: the models of one application, and the nursery they live in."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import platform
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, TypedDict, Unpack

import trio

from erllama.chat.templates import TemplateCache
from erllama.engine.cache_link import CacheLink
from erllama.engine.cold import cold_shape_hash
from erllama.engine.handle import Handle
from erllama.engine.home import current_home, require_home
from erllama.errors import (
    AlreadyLoaded,
    HandleClosed,
    InvalidConfig,
    InvalidOption,
    MissingConfig,
    NotLoaded,
    UnknownOption,
)
from erllama.kvcache.key import Identity
from erllama.kvcache.policy import SavePolicy
from erllama.kvcache.store import StoreOptions, open_store
from erllama.kvcache.tiers import RAM_TIER, RamTier
from erllama.options import (
    ContextOptions,
    EngineConfig,
    ModelOptions,
    Rejected,
    optional,
    string,
    two_strings,
    unknown_option,
)

from .block import Block
from .cache import Cache
from .calls import Calls
from .chat import ModelChat
from .model import Model
from .raw_thinking import RawThinking

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from erllama.backend import Backend, BackendFacts
    from erllama.checks import Check
    from erllama.kvcache.store import KvStore
    from erllama.kvcache.tiers import DiskTier, RamFileTier
    from erllama.middleware import Middleware
    from erllama.types import Request

    from .info import ModelInfo, RequestInfo

log = logging.getLogger("erllama.runtime")


class EngineOverrides(TypedDict, total=False):
    """See `erllama.options.EngineConfig`."""

    stream_buffer_events: int
    tiers: Sequence[DiskTier | RamFileTier]
    ram_max_bytes: int
    ram_spill: str | None
    lookup_log: str | None
    writer_max_concurrent: int
    evict_save_timeout_s: float
    chat_cache_size: int
    thinking_signing_key: bytes | None
    middleware: Sequence[Middleware]


class Engine:
    """Models by id. Made by `open_engine`, which owns its tasks."""

    def __init__(self, config: EngineConfig, nursery: trio.Nursery, store: KvStore) -> None:
        self.config = config
        self.cache = Cache(store, lambda: [m.handle.actor for m in self._models.values()])
        self._nursery = nursery
        self._home = current_home()
        self._models: dict[str, Model] = {}
        self._loading: set[str] = set()
        self._numbers = itertools.count(1)
        self._templates = TemplateCache(config.chat_cache_size)
        self._closed = False

    def __repr__(self) -> str:
        return f"<Engine {', '.join(map(repr, self._models.values())) or 'without models'}>"

    async def load_model(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        model_id: str | None = None,
        model: ModelOptions | None = None,
        context: ContextOptions | None = None,
        policy: SavePolicy | None = None,
        tier: str = RAM_TIER,
        backend: Literal["llama"] | Backend = "llama",
        chat_template: str | None = None,
        thinking_markers: Sequence[str] | None = None,
        progress: Callable[[float], None] | None = None,
        exact: Literal["session", "cold"] = "session",
        deterministic: bool = False,
        **unknown: Never,
    ) -> Model:
        """Load a GGUF file and start serving it.

        `tier` names where its KV is kept: in RAM only, unless it names one of the engine's file tiers.
        `policy` says what of it.

        `chat_template` (Jinja) takes the place of the file's own. `thinking_markers` are the texts that begin
        and end thinking, for streams of raw prompts with `thinking=True`.

        `exact`: what requests get that do not say. "session": the answer of the same engine had it never
        dropped anything; "cold": bit for bit that of a fresh context, which means one request at a time.
        `deterministic`: no request may say otherwise, so the same prompt and seed give the same bits whatever
        else is asked.

        `progress` gets fractions from 0 to 1 in the trio thread. `backend` may be an object of one's own
        that implements `erllama.backend.Backend`; it needs no path.
        Raises: `UnknownOption`, `MissingConfig` (no path), `InvalidConfig` (no file there), `AlreadyLoaded`,
        `MalformedGguf`, `NotSupported`, `ModelWouldOom`, `LoadFailed`, `NativeLibraryError`,
        `HandleClosed` (the engine is).
        Cancellation: the load is abandoned, waited for and leaves nothing behind.
        """
        require_home(self._home)
        for name in unknown:
            raise _unknown_argument(name)
        if self._closed:
            raise HandleClosed("the engine is closed; load models inside its `async with` block")
        for name, given, wanted in (
            ("model", model, ModelOptions),
            ("context", context, ContextOptions),
            ("policy", policy, SavePolicy),
            ("model_id", model_id, str),
        ):
            if given is not None and not isinstance(given, wanted):
                raise InvalidOption(
                    f"load_model: {name}={given!r}: expected {wanted.__name__}",
                    detail={"key": name, "value": given},
                )
        if progress is not None and not callable(progress):
            raise InvalidOption(
                f"load_model: progress={progress!r}: expected a function of one number",
                detail={"key": "progress", "value": progress},
            )
        markers = _checked("thinking_markers", optional(two_strings), thinking_markers)
        template = _checked("chat_template", optional(string), chat_template)
        asked = context or ContextOptions()
        context_options = asked.resolved()
        self._check_tier(tier)
        if exact not in ("session", "cold"):
            raise InvalidOption(
                f"load_model: exact={exact!r}: expected 'session' or 'cold'",
                detail={"key": "exact", "value": exact},
            )
        if not isinstance(deterministic, bool):
            raise InvalidOption(
                f"load_model: deterministic={deterministic!r}: expected True or False",
                detail={"key": "deterministic", "value": deterministic},
            )
        made, file = _make_backend(path, backend, model or ModelOptions(), asked)
        model_id = self._claim_id(model_id, file)
        try:
            handle = await Handle.open(
                model_id,
                made,
                context_options,
                progress,
                lambda facts: self._link(made, facts, policy or SavePolicy(), tier, file or model_id),
                self.config.evict_save_timeout_s,
                "cold" if deterministic else exact,
                deterministic,
            )
            if self._closed:  # meanwhile
                handle.stop()
                await handle.serve()
                raise HandleClosed(f"the engine was closed while {model_id!r} was being loaded")
            self._warn_of_ram_only(model_id, tier)
            loaded = self._model(handle, file, template, markers)
            self._models[model_id] = loaded
            self._nursery.start_soon(self._serve, handle)
        finally:
            self._loading.discard(model_id)
        return loaded

    def _model(
        self, handle: Handle, file: str | None, template: str | None, markers: tuple[str, str] | None
    ) -> Model:
        key, n_events = self.config.thinking_signing_key, self.config.stream_buffer_events
        calls = Calls(handle.model_id, self.config.middleware)
        chat = ModelChat(
            handle, self._templates, calls, template=template, signing_key=key, buffer_events=n_events
        )
        thinking = None if markers is None else RawThinking(markers, key)
        return Model(handle, file, n_events, chat, calls, thinking)

    def _check_tier(self, tier: str) -> None:
        known = [t.name for t in self.cache.list_tiers()]
        if tier not in known:
            raise InvalidConfig(
                f"no tier {tier!r}; there are {', '.join(known)}", detail={"key": "tier", "value": tier}
            )

    def _warn_of_ram_only(self, model_id: str, tier: str) -> None:
        """Who has a file tier wants it used."""
        files = [t.name for t in self.cache.list_tiers() if t.name != RAM_TIER]
        if tier == RAM_TIER and files:
            log.warning(
                "%s is kept in RAM only, so it is cold after a restart; write load_model(…, tier=%r)",
                *(model_id, files[0]),
            )

    def _link(
        self, backend: Backend, facts: BackendFacts, policy: SavePolicy, tier: str, file: str
    ) -> CacheLink | None:
        if facts.shape_hash is None:
            return None
        pieces: Callable[[Sequence[int]], list[bytes]] = getattr(
            backend, "key_pieces", lambda tokens: [b""] * len(tokens)
        )
        told = _told(facts, file)
        return CacheLink(
            store=self.cache.store,
            identity=Identity(shape_hash=facts.shape_hash, n_ctx=facts.n_ctx, facts=told),
            cold_identity=Identity(
                shape_hash=cold_shape_hash(facts), n_ctx=facts.n_ctx, facts={**told, "exact": "cold"}
            ),
            policy=policy,
            tier=tier,
            pieces=pieces,
            tokenize=getattr(backend, "tokenize", None) if hasattr(backend, "key_pieces") else None,
        )

    def _claim_id(self, model_id: str | None, file: str | None) -> str:
        if model_id is None:
            stem = Path(file).stem if file else "model"
            model_id = stem
            while model_id in self._models or model_id in self._loading:
                model_id = f"{stem}-{next(self._numbers)}"
        elif model_id in self._models or model_id in self._loading:
            raise AlreadyLoaded(f"model id {model_id!r} is taken; unload it first or choose another")
        self._loading.add(model_id)
        return model_id

    async def _serve(self, handle: Handle) -> None:
        """Supervise one model: its crash ends its own requests and nothing else."""
        try:
            await handle.serve()
        except Exception:
            log.exception("model %s failed and was unloaded; load it again to go on", handle.model_id)
        finally:
            self._templates.purge(handle)
            del self._models[handle.model_id]

    def close_nowait(self) -> None:
        """Begin to end every model, and load no more. `open_engine` does this, and waits."""
        self._closed = True
        self._nursery.cancel_scope.cancel()

    # --- the registry: plain reads ---

    def model(self, model_id: str) -> Model:
        """The model of that id. Raises `NotLoaded`."""
        try:
            return self._models[model_id]
        except KeyError:
            loaded = ", ".join(map(repr, self._models)) or "none"
            raise NotLoaded(f"no model {model_id!r} is loaded; loaded: {loaded}") from None

    def whereis(self, model_id: str) -> Model | None:
        """The model of that id, or None; its `wait_closed` returns when it is unloaded."""
        return self._models.get(model_id)

    def models(self) -> list[ModelInfo]:
        """What is loaded, in order of loading."""
        return [m.info() for m in self._models.values()]

    def requests(self) -> list[RequestInfo]:
        """Requests that wait or run on any model, oldest first."""
        return sorted((r for m in self._models.values() for r in m.requests()), key=lambda r: r.id)

    def request_info(self, request: Request) -> RequestInfo | None:
        """Where a request is; None once it is over."""
        return next((r for r in self.requests() if r.id == request.id), None)

    def queue_depth(self) -> int:
        """Requests that wait or run on any model."""
        return sum(m.queue_depth() for m in self._models.values())

    async def unload(self, model_id: str) -> None:
        """Free a model. Raises `NotLoaded`. Cancellation: it is freed all the same."""
        await self.model(model_id).unload()


def open_engine(
    config: EngineConfig | None = None, **overrides: Unpack[EngineOverrides]
) -> AbstractAsyncContextManager[Engine]:
    """An engine for the block; leaving the block ends running requests and frees every model.

    Raises: `UnknownOption`, `InvalidOption`, `InvalidConfig` (a tier's folder cannot be made),
    `RequestError` with reason "wrong_loop" outside trio.
    Several engines may be open at once. Thread: an engine and its models belong to the trio loop that
    opened it; another loop of the same process opens its own.
    """
    return Block(_open_engine(config, overrides), "async with open_engine() as engine")


@asynccontextmanager
async def _open_engine(config: EngineConfig | None, overrides: EngineOverrides) -> AsyncIterator[Engine]:
    current_home()
    if config is None:
        config = EngineConfig(**overrides)
    elif overrides:
        config = EngineConfig(**{**vars(config), **overrides})
    options = StoreOptions(
        ram=RamTier(max_bytes=config.ram_max_bytes, spill=config.ram_spill),
        tiers=config.tiers,
        lookup_log=config.lookup_log,
        writer_max_concurrent=config.writer_max_concurrent,
        shutdown_s=config.evict_save_timeout_s,
    )
    error: BaseException | None = None
    try:
        async with open_store(options) as store, trio.open_nursery() as nursery:
            engine = Engine(config, nursery, store)
            try:
                yield engine
            except trio.Cancelled:
                raise
            except BaseException as raised:  # raised again below, as itself and not in groups of one
                error = raised
            finally:
                engine.close_nowait()
    except BaseException:
        if error is None:
            raise  # cancelled: neither model nor store tasks raise anything else
    if error is not None:
        raise error


def _checked(name: str, check: Check, value: object) -> Any:
    try:
        return check(value)
    except Rejected as why:
        raise InvalidOption(
            f"load_model: {name}={value!r}: expected {why}", detail={"key": name, "value": value}
        ) from None


def _told(facts: BackendFacts, file: str) -> dict[str, Any]:
    """What cache files say, to people and tools, about where their KV comes from."""
    build = facts.details.get("build")
    return {
        "model": Path(file).name,
        "quantisation": facts.quant_tag,
        "memory": facts.memory_kind.value,
        "host": platform.node(),
        "erllama": _version(),
        "llama_cpp": "" if build is None else build.llama_version,
    }


def _version() -> str:
    try:
        return metadata.version("erllama")
    except metadata.PackageNotFoundError:
        return ""  # run from its sources


def _unknown_argument(name: str) -> UnknownOption:
    """What `load_model` does not take; most often an option that belongs in one of its option objects."""
    for argument, kind in (("context", ContextOptions), ("model", ModelOptions)):
        names = [field.name for field in dataclasses.fields(kind)]
        if name in names:
            write = f"{argument}={kind.__name__}({name}=…)"
            return unknown_option(name, names, where="load_model", instead=f"write {write}")
    known = (
        *("path", "model_id", "model", "context", "policy", "tier", "backend", "progress"),
        *("chat_template", "thinking_markers"),
        *("exact", "deterministic"),
    )
    return unknown_option(name, known, where="load_model")


def _make_backend(
    path: str | os.PathLike[str] | None,
    backend: Literal["llama"] | Backend,
    model: ModelOptions,
    context: ContextOptions,
) -> tuple[Backend, str | None]:
    if not isinstance(backend, str):
        return backend, None if path is None else os.fspath(path)
    if backend != "llama":
        raise InvalidConfig(
            f"backend={backend!r}: expected 'llama' or an object of your own; what computes (CPU, CUDA, …) "
            "is chosen when the native library is built, see docs/guides/building.md",
            detail={"backend": backend},
        )
    if path is None:
        raise MissingConfig("load_model needs the path of a GGUF file")
    if not isinstance(path, str | os.PathLike):
        raise InvalidConfig(f"{path!r} is no path; name a GGUF file", detail={"key": "path", "value": path})
    file = os.path.expanduser(os.fspath(path))
    if "\0" in file or not os.path.isfile(file):
        raise InvalidConfig(_no_file(file), detail={"key": "path", "value": file})
    from erllama.engine.llama_backend import LlamaBackend  # native code is loaded with the first model

    adapt = context.n_threads is None and context.n_threads_batch is None
    return LlamaBackend(file, model, context.resolved(), adapt_threads=adapt), file


def _no_file(file: str) -> str:
    if not file:
        return "the path of the model is empty; name a GGUF file"
    if "\0" not in file and os.path.isdir(file):
        return f"{file!r} is a folder; name a GGUF file in it"
    return f"no file at {file!r}; give the path of a GGUF file (relative ones start in {os.getcwd()})"
