"""Request bodies: the base of the dialects' models, and their complaints in our words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, model_validator

from erllama.errors import ErllamaError, InvalidContent, InvalidOption, UnknownOption

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from fastapi.exceptions import RequestValidationError


class _Body(BaseModel):
    """A body, or an object in one. Types are JSON's own: "5" is no number, and 1 is not true."""

    @model_validator(mode="before")
    @classmethod
    def _as_json_has_it(cls, values: Any) -> Any:
        """A field that is null has its default, as OpenAI and Ollama have it; 5.0 is an integer."""
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        return {
            key: _number(value) for key, value in values.items() if value is not None or key not in fields
        }


def _number(value: Any) -> Any:
    """A number without a fraction as an integer; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Strict(_Body):
    """A body whose unknown fields are refused, as OpenAI and Anthropic refuse them."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Lenient(_Body):
    """A body whose unknown fields are ignored and named in a header, as Ollama ignores them."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)


def ignored_note(names: Sequence[str]) -> tuple[str, ...]:
    """The header that says which fields had no effect."""
    shown = ", ".join(name for name in sorted(names) if _is_plain(name))[:400]
    return (f"x-erllama-ignored: {shown}",) if shown else ()


def _is_plain(name: str) -> bool:
    return name.isascii() and all(part.isidentifier() for part in name.split("."))


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are None."""
    return {name: value for name, value in values.items() if value is not None}


def validation_error(failure: RequestValidationError) -> ErllamaError:
    """The first complaint as an error that names the field."""
    first = failure.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query")]
    key = ".".join(place) or "body"
    if first["type"] == "json_invalid":
        return InvalidContent("the body is not JSON", detail={"key": "body"})
    if first["type"] == "extra_forbidden":
        return UnknownOption(f"unknown parameter: {key!r}", detail={"key": key})
    if first["type"] == "missing" and not place:
        return InvalidContent("the body is empty; send JSON", detail={"key": "body"})
    if first["type"] == "missing":
        return InvalidOption(f"missing parameter: {key!r}", reason="missing_option", detail={"key": key})
    return InvalidOption(f"{key}: {first['msg']}", detail={"key": key})


def check_keys(place: str, given: object, known: Container[str]) -> None:
    """Raise `UnknownOption` for a key of an inner object that means nothing there."""
    for key in given if isinstance(given, Mapping) else ():
        if key not in known:
            raise UnknownOption(f"unknown parameter: '{place}.{key}'", detail={"key": f"{place}.{key}"})


def check_count(name: str, items: Sequence[object] | None, n_max: int) -> None:
    """Raise `InvalidOption` for more items than the server takes."""
    if items is not None and len(items) > n_max:
        raise InvalidOption(f"{name}: at most {n_max}, not {len(items)}", detail={"key": name})


def refuse(key: str, why: str) -> InvalidOption:
    """A field that would have no effect: the caller would wait for one."""
    return InvalidOption(f"{key}: {why}", detail={"key": key})
