"""A Jinja sandbox for chat templates of unknown origin: bounded work, bounded memory, no reach beyond the values given.

A template comes with a checkpoint, so it is code by a stranger. Jinja's own sandbox blocks attributes; this one also
counts loop rounds, calls and filters, limits the size of every string and list that a template can build, and offers
only the methods and filters that chat templates use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 3_000_000
MAX_CHARACTERS = 8_000_000
MAX_SECONDS = 10.0
_MAX_ITEMS = 100_000
_MAX_INTEGER_BITS = 256
_MAX_DEPTH = 64
_STEPS_PER_CALL = 30

_STRING_METHODS = frozenset(
    {"strip", "lstrip", "rstrip", "split", "rsplit", "startswith", "endswith", "upper", "lower", "title"}
    | {"capitalize", "find", "rfind", "index", "count", "removeprefix", "removesuffix", "partition"}
    | {"rpartition", "isdigit", "isalpha", "isalnum", "isspace", "replace", "join"}
)
_MAPPING_METHODS = frozenset({"get", "items", "keys", "values"})
_SEQUENCE_METHODS = frozenset({"index", "count"})
_FILTERS = frozenset(
    {"abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last"}
    | {"length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "safe"}
    | {"select", "selectattr", "sort", "string", "title", "trim", "unique", "upper"}
)


_PLAIN = (str, bool, int, float, Undefined, type(None))
_LISTING = frozenset({"sync_do_list", "do_list", "do_sort", "sync_do_unique", "do_unique", "do_reverse"})


class LimitExceededError(SecurityError):
    """The template asked for more work or memory than any chat template needs."""


class ChatSandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. Not re-entrant: call `start` before each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        from jinja2.ext import loopcontrols

        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], finalize=self._finalise)
        self.filters = {name: self._counted(function) for name, function in self.filters.items() if name in _FILTERS}
        self.filters["replace"] = self._replace
        self.filters["join"] = self._join_filter
        self.filters["string"] = self._finalise
        self.filters["bounded_container"] = self._container
        self.filters["bounded_iteration"] = self._iterate
        self.filters["bounded_concatenation"] = self._concatenate
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace", "joiner")}
        self.concat = self._concatenate  # type: ignore[method-assign]
        self.start()

    def start(self) -> None:
        """Begin a rendering with a fresh budget."""
        self._steps = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def compile_bounded(self, source: str) -> Any:
        """The compiled template, every loop and concatenation of it counted."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filter(loop.iter, "bounded_iteration")
        _bound_values(tree)
        return self.from_string(tree)

    def spend(self, steps: int = 1) -> None:
        """Count work. Raises LimitExceededError when the budget is used up."""
        self._steps += steps
        if self._steps > MAX_STEPS or time.monotonic() > self._deadline:
            raise LimitExceededError("it loops too long")

    def wrap_str_format(self, value: Any) -> None:
        """`str.format` can build texts of any length, so that it is not offered (see `is_safe_attribute`)."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _STRING_METHODS
        if isinstance(obj, dict):
            return attr in _MAPPING_METHODS
        if isinstance(obj, (list, tuple)):
            return attr in _SEQUENCE_METHODS
        return bool(super().is_safe_attribute(obj, attr, value))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            self.spend(1 + len(owner) // 4096)
            if name == "replace":
                return self._replace(owner, *args, **kwargs)
            if name == "join":
                return self._join(owner, *args, **kwargs)
            if name in ("split", "rsplit"):
                separator = args[0] if args else None
                parts = owner.count(separator) if isinstance(separator, str) else len(owner) // 2
                self._check(parts, [])
        self.spend(_STEPS_PER_CALL)
        result = super().call(context, obj, *args, **kwargs)
        return self._container(result) if obj is dict else result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.spend()
        if operator == "%" and not (_is_number(left) and _is_number(right)):
            raise SecurityError("it uses % on something that is not a number")
        if operator == "**" and not (abs(_number(left)) <= 64 and abs(_number(right)) <= 64):
            raise LimitExceededError("it computes a number that is too large")
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)):
                    self._check(len(sequence) * max(0, int(times)), sequence)
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            self._check(len(left) + len(right), left)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > _MAX_INTEGER_BITS:
            raise LimitExceededError("it computes a number that is too large")
        return result

    def _check(self, size: int, kind: Any = "") -> None:
        if size > (MAX_CHARACTERS if isinstance(kind, str) else _MAX_ITEMS):
            raise LimitExceededError("it builds too large a value")
        self.spend(size // 4096)

    def _container(self, value: Any) -> Any:
        """A list, tuple or dict that the template made, if it is not too large with all that is in it."""
        self._count(value, 0)
        return value

    def _count(self, value: Any, depth: int, to_write: bool = False) -> None:
        if isinstance(value, (list, tuple, dict)):
            if depth > _MAX_DEPTH:
                raise LimitExceededError("it nests values too deeply")
            self.spend(1 + len(value))
            for item in value.values() if isinstance(value, dict) else value:
                self._count(item, depth + 1, to_write)
        elif to_write and not isinstance(value, _PLAIN):
            raise SecurityError(f"it writes a {type(value).__name__}")

    def _finalise(self, value: Any) -> str:
        """What `{{ value }}` writes."""
        if isinstance(value, str):
            return value
        self._count(value, 0, to_write=True)
        text = str(value)
        self._check(len(text))
        return text

    def _iterate(self, values: Iterable[Any]) -> Any:
        if isinstance(values, Undefined):
            return values
        return self._counting(values)

    def _counting(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.spend()
            yield value

    def _concatenate(self, parts: Iterable[Any]) -> str:
        texts: list[str] = []
        size = 0
        for part in parts:
            text = self._finalise(part)
            size += len(text)
            if size > MAX_CHARACTERS:
                raise LimitExceededError("it builds too large a text")
            texts.append(text)
        self.spend(1 + size // 4096)
        return "".join(texts)

    def _join_filter(self, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            value = [self.getitem(item, attribute) for item in value]
        return self._join(d, value)

    def _join(self, separator: str, values: Iterable[Any]) -> str:
        items = list(values)
        self._check(len(separator) * len(items))
        return self._concatenate(part for index, item in enumerate(items) for part in ((separator, item) if index else (item,)))

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        text = str(text)
        found = text.count(old)
        self._check(len(text) + (found if count is None or count < 0 else min(found, count)) * len(new))
        return str(text).replace(old, new, -1 if count is None else count)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        from functools import wraps

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            sizes = [len(value) for value in args if isinstance(value, (str, list, tuple, dict))]
            if function.__name__ in _LISTING and max(sizes, default=0) > _MAX_ITEMS:
                raise LimitExceededError("it builds too large a value")
            self.spend(1 + sum(sizes) // 64)
            return function(*args, **kwargs)

        return bounded


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _bound_values(node: nodes.Node) -> None:
    """Let the sandbox measure every concatenation, and every list or mapping with parts that are not constant."""
    for child in node.iter_child_nodes():
        _bound_values(child)
    for name, value in list(node.iter_fields()):
        if isinstance(value, nodes.Node):
            setattr(node, name, _bounded(value))
        elif isinstance(value, list):
            setattr(node, name, [_bounded(item) if isinstance(item, nodes.Node) else item for item in value])


def _bounded(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.Concat):
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "bounded_concatenation")
    if isinstance(node, nodes.Tuple) and node.ctx != "load":
        return node
    if isinstance(node, (nodes.List, nodes.Tuple, nodes.Dict)) and any(
        not isinstance(child, nodes.Const) for child in node.iter_child_nodes()
    ):
        return _filter(node, "bounded_container")
    return node


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _number(value: Any) -> float:
    if not _is_number(value):
        raise SecurityError("it uses ** on something that is not a number")
    return float(value)
