"""erllama: local language models for trio, over the stock llama.cpp library.

`open_engine()` gives an engine, `engine.load_model(path)` a model, `model.complete(prompt)` an answer and
`model.stream(prompt)` its events as they come. Importing this loads nothing but what the names in use need,
and native code with the first model, so that `erllama --help` is there at once.
"""

TYPE_CHECKING = False  # as type checkers know it; importing it from typing would cost most of the import

if TYPE_CHECKING:
    from .chat.options import ChatOptions as ChatOptions
    from .chat.prompt import ChatParams as ChatParams
    from .errors import AlreadyLoaded as AlreadyLoaded
    from .errors import AuthenticationFailed as AuthenticationFailed
    from .errors import BatchOverflow as BatchOverflow
    from .errors import BodyTooLarge as BodyTooLarge
    from .errors import ContextOverflow as ContextOverflow
    from .errors import DecodeAborted as DecodeAborted
    from .errors import DecodeFailed as DecodeFailed
    from .errors import DecodeTimeout as DecodeTimeout
    from .errors import EngineError as EngineError
    from .errors import EngineReset as EngineReset
    from .errors import EngineUnresponsive as EngineUnresponsive
    from .errors import ErllamaError as ErllamaError
    from .errors import FetchFailed as FetchFailed
    from .errors import HandleClosed as HandleClosed
    from .errors import InvalidConfig as InvalidConfig
    from .errors import InvalidContent as InvalidContent
    from .errors import InvalidGrammar as InvalidGrammar
    from .errors import InvalidOption as InvalidOption
    from .errors import LoadFailed as LoadFailed
    from .errors import MalformedGguf as MalformedGguf
    from .errors import MissingConfig as MissingConfig
    from .errors import MissingOption as MissingOption
    from .errors import ModelCrashed as ModelCrashed
    from .errors import ModelLoading as ModelLoading
    from .errors import ModelNotFound as ModelNotFound
    from .errors import ModelWouldOom as ModelWouldOom
    from .errors import NativeError as NativeError
    from .errors import NativeLibraryError as NativeLibraryError
    from .errors import NoLogits as NoLogits
    from .errors import NoSession as NoSession
    from .errors import NotLoaded as NotLoaded
    from .errors import NotSupported as NotSupported
    from .errors import Overloaded as Overloaded
    from .errors import QueueFull as QueueFull
    from .errors import QueueTimeout as QueueTimeout
    from .errors import RequestError as RequestError
    from .errors import SeqCapacity as SeqCapacity
    from .errors import ShuttingDown as ShuttingDown
    from .errors import StickyBusy as StickyBusy
    from .errors import TranscriptMismatch as TranscriptMismatch
    from .errors import UnknownOption as UnknownOption
    from .kvcache.policy import SavePolicy as SavePolicy
    from .kvcache.tiers import DiskTier as DiskTier
    from .kvcache.tiers import RamFileTier as RamFileTier
    from .kvcache.tiers import RamTier as RamTier
    from .options import ContextOptions as ContextOptions
    from .options import EngineConfig as EngineConfig
    from .options import ModelOptions as ModelOptions
    from .runtime.chat import ChatStatistics as ChatStatistics
    from .runtime.engine import Engine as Engine
    from .runtime.engine import open_engine as open_engine
    from .runtime.info import ModelInfo as ModelInfo
    from .runtime.info import RequestInfo as RequestInfo
    from .runtime.model import Model as Model
    from .runtime.request_calls import collect as collect
    from .types import CacheDelta as CacheDelta
    from .types import CacheHit as CacheHit
    from .types import ChatMessage as ChatMessage
    from .types import Completion as Completion
    from .types import Done as Done
    from .types import EmbeddingFacts as EmbeddingFacts
    from .types import Event as Event
    from .types import Exactness as Exactness
    from .types import Miss as Miss
    from .types import Prefilled as Prefilled
    from .types import Request as Request
    from .types import Stats as Stats
    from .types import Thinking as Thinking
    from .types import ThinkingEnd as ThinkingEnd
    from .types import Token as Token
    from .types import TokenId as TokenId
    from .types import TokenLogprob as TokenLogprob
    from .types import ToolCall as ToolCall
    from .types import ToolCallDelta as ToolCallDelta

    __version__: str

_MODULES = {
    "errors": (
        "AlreadyLoaded",
        "AuthenticationFailed",
        "BatchOverflow",
        "BodyTooLarge",
        "ContextOverflow",
        "DecodeAborted",
        "DecodeFailed",
        "DecodeTimeout",
        "EngineError",
        "EngineReset",
        "EngineUnresponsive",
        "ErllamaError",
        "FetchFailed",
        "HandleClosed",
        "InvalidConfig",
        "InvalidContent",
        "InvalidGrammar",
        "InvalidOption",
        "LoadFailed",
        "MalformedGguf",
        "MissingConfig",
        "MissingOption",
        "ModelCrashed",
        "ModelLoading",
        "ModelNotFound",
        "ModelWouldOom",
        "NativeError",
        "NativeLibraryError",
        "NoLogits",
        "NoSession",
        "NotLoaded",
        "NotSupported",
        "Overloaded",
        "QueueFull",
        "QueueTimeout",
        "RequestError",
        "SeqCapacity",
        "ShuttingDown",
        "StickyBusy",
        "TranscriptMismatch",
        "UnknownOption",
    ),
    "kvcache.policy": ("SavePolicy",),
    "kvcache.tiers": (
        "DiskTier",
        "RamFileTier",
        "RamTier",
    ),
    "options": (
        "ContextOptions",
        "EngineConfig",
        "ModelOptions",
    ),
    "types": (
        "CacheDelta",
        "CacheHit",
        "ChatMessage",
        "Completion",
        "Done",
        "EmbeddingFacts",
        "Event",
        "Exactness",
        "Miss",
        "Prefilled",
        "Request",
        "Stats",
        "Thinking",
        "ThinkingEnd",
        "Token",
        "TokenId",
        "TokenLogprob",
        "ToolCall",
        "ToolCallDelta",
    ),
    "chat.options": ("ChatOptions",),
    "chat.prompt": ("ChatParams",),
    "runtime.chat": ("ChatStatistics",),
    "runtime.engine": (
        "Engine",
        "open_engine",
    ),
    "runtime.info": (
        "ModelInfo",
        "RequestInfo",
    ),
    "runtime.model": ("Model",),
    "runtime.request_calls": ("collect",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = ("errors", "options", "types")
__all__ = sorted(_HOME)  # strings, whatever the linter can see


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from importlib import import_module, metadata

        if name in _HOME:
            found = getattr(import_module(f".{_HOME[name]}", __name__), name)
            return globals().setdefault(name, found)
        if name in _SUBMODULES:
            return import_module(f".{name}", __name__)
        if name == "__version__":
            try:
                return metadata.version(__name__)
            except metadata.PackageNotFoundError:
                return "0+source"  # run from its sources, not installed
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOME, *_SUBMODULES} - {"TYPE_CHECKING"})
