"""Dataclasses from JSON, strictly: every field present or defaulted, of its declared type, none unknown."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any


class RecordError(Exception):
    """A JSON value that does not fit the declared type; the message starts with the field's path."""


def decode(declared: Any, value: object, where: str) -> Any:
    """`value` (from json.loads) as an instance of the type `declared`.

    Understands str, int, float (finite; an int is taken too), bool, dataclasses, tuple[T, ...],
    tuple[A, B, C], dict[str, T] and `T | None`. `where` is the value's path for messages. Raises RecordError.
    """
    if dataclasses.is_dataclass(declared) and isinstance(declared, type):
        return _decode_record(declared, value, where)
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else decode(arguments[0], value, where)
    if origin is tuple:
        return _decode_tuple(arguments, value, where)
    if origin is dict:
        if not isinstance(value, dict):
            raise RecordError(f"{where} must be an object, not {_describe(value)}")
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if declared is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value, where)
    if type(value) is not declared:  # exact: True is no int
        raise RecordError(f"{where} must be of type {declared.__name__}, not {_describe(value)}")
    return value


def _decode_record(declared: type, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        raise RecordError(f"{where} must be an object, not {_describe(value)}")
    hints = typing.get_type_hints(declared)
    fields = {field.name: field for field in dataclasses.fields(declared)}
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise RecordError(f"{where} has the unknown field {unknown[0]!r}")
    optional = {name for name, field in fields.items() if not _required(field)}
    missing = [name for name in fields if name not in value and name not in optional]
    if missing:
        raise RecordError(f"{where} lacks the field {missing[0]!r}")
    return declared(**{name: decode(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _decode_tuple(arguments: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise RecordError(f"{where} must be a list, not {_describe(value)}")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(value) != len(arguments):
        raise RecordError(f"{where} must have {len(arguments)} entries, not {len(value)}")
    pairs = zip(arguments, value, strict=True)
    return tuple(decode(declared, item, f"{where}[{index}]") for index, (declared, item) in enumerate(pairs))


def _finite(value: int | float, where: str) -> float:
    try:
        finite = math.isfinite(value)
    except OverflowError:
        finite = False
    if not finite:
        raise RecordError(f"{where} must be a finite number")
    return value  # an int stays one, so that writing gives the same text again


def _describe(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
