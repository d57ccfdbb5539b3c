"""The tree of errors: who must act, stable reasons, statuses, copies."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest

import erllama
from erllama import errors
from erllama.errors import (
    DecodeFailed,
    EngineError,
    ErllamaError,
    Overloaded,
    Reasons,
    RequestError,
)

BRANCHES = (RequestError, Overloaded, EngineError)
CLASSES = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ErllamaError)
]
LEAVES = [kind for kind in CLASSES if kind is not ErllamaError]


def make(kind: type[ErllamaError], message: str = "") -> ErllamaError:
    """An instance of any class."""
    return kind(message, rc=-3) if kind is DecodeFailed else kind(message)


@pytest.mark.parametrize("kind", LEAVES, ids=lambda k: k.__name__)
def test_each_error_says_who_must_act(kind: type[ErllamaError]):
    """Every class is in exactly one branch: the caller, patience, or us."""
    assert sum(issubclass(kind, branch) for branch in BRANCHES) == 1


def test_reasons_are_stable_and_unique():
    """Reasons are snake_case, and no two classes share one."""
    reasons = [kind.reason for kind in CLASSES]
    assert len(set(reasons)) == len(reasons)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", reason) for reason in Reasons.all())


def test_all_reasons_are_known_in_one_place():
    """Reasons.all() holds every class's reason and the narrower ones."""
    assert {kind.reason for kind in CLASSES} <= Reasons.all()
    assert Reasons.all() >= Reasons.EXTRA
    assert not Reasons.EXTRA & {kind.reason for kind in CLASSES}


def test_every_reason_in_the_sources_is_known(repo_sources: list[str]):
    """Whatever `reason="…"` is raised with anywhere in the package is in Reasons.all()."""
    used = {
        reason
        for text in repo_sources
        for reason in re.findall(
            r'(?<!Miss\()(?<!Miss\(\n            )(?<!Miss\(\n        )reason="(\w+)"', text
        )
    }  # a Miss is no error and has reasons of its own
    assert used
    assert used <= Reasons.all()


@pytest.fixture
def repo_sources() -> list[str]:
    """The text of every module of the package."""
    root = Path(erllama.__file__).parent
    return [path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))]


STATUSES = {
    "RequestError": 400,
    "NotLoaded": 404,
    "NoSession": 404,
    "AlreadyLoaded": 409,
    "TranscriptMismatch": 409,
    "StickyBusy": 503,
    "NotSupported": 501,
    "Overloaded": 429,
    "SeqCapacity": 503,
    "QueueFull": 429,
    "QueueTimeout": 504,
    "ModelLoading": 503,
    "ModelWouldOom": 503,
    "ModelNotFound": 404,
    "AuthenticationFailed": 401,
    "BodyTooLarge": 413,
    "ShuttingDown": 503,
    "EngineUnresponsive": 504,
    "EngineError": 500,
    "ErllamaError": 500,
}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda k: k.__name__)
def test_statuses(kind: type[ErllamaError]):
    """A class answers with its own status or with its branch's."""
    own = STATUSES.get(kind.__name__)
    branch = next((STATUSES[b.__name__] for b in BRANCHES if issubclass(kind, b)), 500)
    assert make(kind).http_status == (own if own is not None else branch)


def test_who_may_try_again_is_told_when():
    """Overloaded errors carry a positive retry_after_s, as does a busy session; the others do not."""
    told = {kind.__name__ for kind in CLASSES if kind.retry_after_s}
    assert told == {kind.__name__ for kind in CLASSES if issubclass(kind, Overloaded)} | {"StickyBusy"}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda k: k.__name__)
def test_an_error_without_a_message_shows_its_reason(kind: type[ErllamaError]):
    """str() is never empty."""
    assert str(make(kind)) == ("llama_decode answered -3" if kind is DecodeFailed else kind.reason)
    assert str(make(kind, "what happened")) == "what happened"


def test_an_instance_may_be_narrower_than_its_class():
    """reason, detail and retry_after_s of one instance leave the class alone."""
    error = EngineError("m", reason="timeout", detail={"n": 1}, retry_after_s=2.5)
    assert (error.reason, error.detail, error.retry_after_s) == ("timeout", {"n": 1}, 2.5)
    assert (EngineError.reason, EngineError.retry_after_s) == ("engine_error", None)
    assert EngineError().detail is None


@pytest.mark.parametrize("kind", CLASSES, ids=lambda k: k.__name__)
@pytest.mark.parametrize(
    "again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))], ids=["copy", "pickle"]
)
def test_copies_are_equal_and_apart(kind: type[ErllamaError], again):
    """Class, message and facts survive a copy and a pickle; the traceback stays with the original."""
    error = make(kind, "what happened")
    error.reason, error.detail = "narrower", {"key": "x"}
    try:
        raise error
    except ErllamaError:
        twin = again(error)
    assert type(twin) is kind
    assert twin is not error
    assert (str(twin), vars(twin)) == (str(error), vars(error))
    assert twin.__traceback__ is None


def test_every_class_is_documented():
    """A sentence for the reader of a traceback."""
    assert all(kind.__doc__ and kind.__doc__.strip().endswith(".") for kind in CLASSES)
