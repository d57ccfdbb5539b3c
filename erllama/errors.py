"""Every error erllama raises, split by who has to act.

`RequestError`: the caller changes something. `Overloaded`: try again later, after
`retry_after_s`. `EngineError`: our fault or the machine's. Each class has a stable
snake_case `reason`; an instance may carry a narrower one. `http_status` is what the
server answers with.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ErllamaError(Exception):
    """Root of all erllama errors.

    Attributes: `reason` (stable, snake_case), `detail` (facts for a program: names, lengths,
    paths), `http_status`, `retry_after_s`.
    """

    reason: str = "error"
    http_status: int = 500
    retry_after_s: float | None = None

    def __init__(
        self,
        message: str = "",
        *,
        reason: str | None = None,
        detail: object = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message or self.reason)
        if reason is not None:
            self.reason = reason
        self.detail = detail
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles whatever the constructor wants; `copy.copy` is how each of several readers
        gets an exception of its own, without the others' traceback."""
        return _restored, (type(self), self.args, dict(vars(self)))


def _restored(kind: type[ErllamaError], args: tuple[object, ...], state: dict[str, object]) -> ErllamaError:
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


class RequestError(ErllamaError):
    """The caller has to change something."""

    reason = "invalid_request"
    http_status = 400


class UnknownOption(RequestError):
    """An option that does not exist; the message names the nearest one that does."""

    reason = "unknown_option"


class InvalidOption(RequestError):
    """An option with a value of the wrong type or outside its range."""

    reason = "invalid_option"


class MissingOption(RequestError):
    """A required option was not given."""

    reason = "missing_option"


class InvalidContent(RequestError):
    """Text, tokens or messages that cannot be used as they are."""

    reason = "invalid_content"


class InvalidGrammar(RequestError):
    """A grammar or schema that cannot be honoured; names the rule, property or keyword at fault."""

    reason = "invalid_grammar"


class ContextOverflow(RequestError):
    """The prompt reaches or exceeds the context length; `detail` has both lengths."""

    reason = "context_overflow"


class BatchOverflow(RequestError):
    """A non-causal embedding input longer than one physical batch."""

    reason = "batch_overflow"


class NotLoaded(RequestError):
    """No such model, or it has been unloaded."""

    reason = "not_loaded"
    http_status = 404


class ModelNotFound(RequestError):
    """The server knows no model of that name."""

    reason = "model_not_found"
    http_status = 404


class AuthenticationFailed(RequestError):
    """The server wants an API key, and this is none of them."""

    reason = "authentication_error"
    http_status = 401


class BodyTooLarge(RequestError):
    """The request's body is larger than the server takes; `detail` has the limit."""

    reason = "body_too_large"
    http_status = 413


class AlreadyLoaded(RequestError):
    """The model id is taken."""

    reason = "already_loaded"
    http_status = 409


class StickyBusy(RequestError):
    """The session already has a request in flight."""

    reason = "sticky_busy"
    http_status = 503
    retry_after_s = 1.0


class NoSession(RequestError):
    """The session is not, or no longer, held."""

    reason = "no_session"
    http_status = 404


class TranscriptMismatch(RequestError):
    """`expect_committed` differs from what is stored; `detail` says where."""

    reason = "transcript_mismatch"
    http_status = 409


class MissingConfig(RequestError):
    """A required piece of configuration is absent."""

    reason = "missing_config"


class InvalidConfig(RequestError):
    """Configuration that names something that is not there; `detail` has key and value."""

    reason = "invalid_config"


class MalformedGguf(RequestError):
    """The file is not a GGUF that llama.cpp can read."""

    reason = "malformed_gguf"


class NotSupported(RequestError):
    """This model, backend or build cannot do that; the message says why."""

    reason = "not_supported"
    http_status = 501


class HandleClosed(RequestError):
    """A model, context or sampler was used after it had been closed."""

    reason = "freed"


class Overloaded(ErllamaError):
    """Try again later."""

    reason = "overloaded"
    http_status = 429
    retry_after_s = 1.0


class SeqCapacity(Overloaded):
    """Every sequence is busy and the caller asked not to wait."""

    reason = "seq_capacity"
    http_status = 503


class QueueFull(Overloaded):
    """The model's queue has reached its depth."""

    reason = "queue_full"


class QueueTimeout(Overloaded):
    """The request waited longer for a sequence than it was willing to."""

    reason = "queue_timeout"
    http_status = 504


class ModelLoading(Overloaded):
    """The model is still being loaded."""

    reason = "model_loading"
    http_status = 503


class ModelWouldOom(Overloaded):
    """Loading would need more memory than there is; `detail` has the estimate."""

    reason = "model_would_oom"
    http_status = 503


class ShuttingDown(Overloaded):
    """The server is about to end and takes no more requests."""

    reason = "shutting_down"
    http_status = 503


class EngineError(ErllamaError):
    """Our fault, or the machine's."""

    reason = "engine_error"


class EngineUnresponsive(EngineError):
    """The server waited longer for the engine than its limits allow; `detail` names the limit."""

    reason = "engine_unresponsive"
    http_status = 504


class LoadFailed(EngineError):
    """llama.cpp refused the model or the context; the message quotes its log."""

    reason = "load_failed"


class LoadCancelled(EngineError):
    """The load was cancelled through its progress object."""

    reason = "load_cancelled"


class InvalidBatch(EngineError):
    """A batch that llama.cpp would refuse or die of; `detail` names the row, the value and the limit."""

    reason = "invalid_batch"


class DecodeTimeout(EngineError):
    """A step ran over `decode_budget_s`."""

    reason = "decode_timeout"


class DecodeAborted(EngineError):
    """A step was aborted on behalf of all its requests."""

    reason = "decode_aborted"


class DecodeFailed(EngineError):
    """`llama_decode` answered with an error; `rc` is its return code."""

    reason = "decode_failed"

    def __init__(self, message: str = "", *, rc: int, detail: object = None) -> None:
        super().__init__(message or f"llama_decode answered {rc}", detail=detail)
        self.rc = rc


class NoLogits(EngineError):
    """There is no output row to sample from: nothing was decoded, or the row was not marked."""

    reason = "no_logits"


class EngineReset(EngineError):
    """The session or context was reset while the request ran."""

    reason = "engine_reset"


class ModelCrashed(EngineError):
    """The process running the model died."""

    reason = "model_crashed"


class NativeLibraryError(EngineError):
    """The native library is missing or was built from other sources; the message says what to run."""

    reason = "native_library"


class FetchFailed(EngineError):
    """A model could not be fetched; the message says what to do.

    `reason` may be narrower: `no_pip`, `no_index`, `no_space` or `wrong_hash`.
    """

    reason = "fetch_failed"


class NativeError(EngineError):
    """A C++ exception came out of llama.cpp; the message is its text. `reason` is `exception` or `oom`."""

    reason: str = "exception"


def _all_subclasses(root: type[ErllamaError]) -> set[type[ErllamaError]]:
    found = {root}
    for child in root.__subclasses__():
        found |= _all_subclasses(child)
    return found


class Reasons:
    """All reasons by name; the documentation and a test are generated from it."""

    EXTRA: ClassVar[frozenset[str]] = frozenset(
        (
            *("oom", "timeout", "no_room", "wrong_loop", "no_pip", "no_index", "no_space", "wrong_hash"),
            *("empty_prefix", "busy", "no_gpu", "chat_not_supported", "peer_failed", "not_measured"),
            *("previous_response_not_found",),
        )
    )

    @classmethod
    def all(cls) -> frozenset[str]:
        """Every reason a raised error may carry."""
        return frozenset(kind.reason for kind in _all_subclasses(ErllamaError)) | cls.EXTRA
