"""The public names of `erllama`, literally: growing or shrinking the surface is a decision."""

from __future__ import annotations

import inspect
import subprocess
import sys

import erllama

PUBLIC = {
    # engine and model
    "open_engine", "collect", "Engine", "Model", "ModelInfo", "RequestInfo",
    # options
    "ContextOptions", "DiskTier", "EngineConfig", "ModelOptions", "RamFileTier", "RamTier", "SavePolicy",
    # results and events
    "CacheDelta", "CacheHit", "Completion", "Done", "EmbeddingFacts", "Event", "Exactness", "Miss",
    "Prefilled", "Request", "Stats", "Token",
    "TokenId", "TokenLogprob",
    # chat
    "ChatMessage", "ChatOptions", "ChatParams", "ChatStatistics", "Thinking", "ThinkingEnd", "ToolCall",
    "ToolCallDelta",
    # errors
    "ErllamaError", "RequestError", "Overloaded", "EngineError",
    "AlreadyLoaded", "AuthenticationFailed", "BatchOverflow", "BodyTooLarge", "EngineUnresponsive",
    "ModelNotFound", "ShuttingDown", "ContextOverflow", "DecodeAborted", "DecodeFailed", "DecodeTimeout",
    "EngineReset", "FetchFailed", "HandleClosed", "InvalidConfig", "InvalidContent", "InvalidGrammar",
    "InvalidOption", "LoadFailed", "MalformedGguf", "MissingConfig", "MissingOption", "ModelCrashed",
    "ModelLoading", "ModelWouldOom", "NativeError", "NativeLibraryError", "NoLogits", "NoSession",
    "NotLoaded", "NotSupported", "QueueFull", "QueueTimeout", "SeqCapacity", "StickyBusy",
    "TranscriptMismatch", "UnknownOption",
}  # fmt: skip


def test_the_public_names_are_these():
    """What `erllama` offers equals the list above, submodules aside."""
    offered = {
        name
        for name in dir(erllama)
        if not name.startswith("_") and not inspect.ismodule(getattr(erllama, name))
    }
    assert offered == PUBLIC


def test_every_public_name_is_documented():
    """Classes and functions that users meet carry a docstring of their own."""
    bare = [
        name
        for name in PUBLIC
        if inspect.isclass(thing := getattr(erllama, name)) or inspect.isfunction(thing)
        if not thing.__doc__
    ]
    assert not bare


def test_importing_erllama_loads_no_native_code():
    """B4: the import neither loads the binding nor initialises a backend."""
    program = (
        "import sys, erllama, erllama.models, erllama.cli\n"
        "print([m for m in sys.modules if '_native' in m or m == 'erllama.llama.backend'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
