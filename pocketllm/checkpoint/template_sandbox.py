"""The sandbox in which chat templates run: Jinja2's immutable one, with every operation metered.

A template comes with a model file, so it is untrusted code. Jinja2's sandbox keeps it away from Python's internals;
this one also bounds what it can spend:

- *Reach.* Attributes are those listed in `_ATTRIBUTES`, filters and globals those listed below; there is no loader.
- *Work.* Every loop iteration, call, filter and operator costs a step plus the size of what it makes, out of one
  budget per rendering. Loops are metered where they draw their next item, so nesting them does not help.
- *Size.* No value that a template makes may be larger than a limit, and sharing counts as often as it shows: a list
  that holds itself twice, forty times over, is refused before anything compares, hashes or prints it. What could
  grow in a single operation (repetition, powers, padding, replacement, joining) is checked before it is done.
- *Time.* A deadline stops what the budget counts too kindly, such as comparing large values again and again.

The hook for the metering is the syntax tree: `_Metering` wraps loops, displays, slices and ``~`` in calls to methods
of the environment before Jinja2 compiles it.
"""

from __future__ import annotations

import functools
import json
import re
import string
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_STEP = 200  # what a step costs, in units of one character made
_ITEM = 16  # what an item of a new list or mapping costs, as much as the memory it takes
_MAX_INTEGER_BITS = 4096
_MAX_MESSAGE = 10_000  # characters of what a template says when it refuses
_MAX_WIDTH = 1000  # of indentation, and digits of rounding
_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{4,})")
_BRACE_WIDTH = re.compile(r"\{|\d{4,}")  # inside a format specification


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one rendering may spend.

    Attributes:
        work: units: a character made is one, a step (an iteration, a call) is two hundred.
        size: characters of the prompt, and of any value on the way.
        seconds: wall time.
        source: characters of the template itself.
    """

    work: int = 1 << 28
    size: int = 1 << 24
    seconds: float = 10.0
    source: int = 1 << 18


class LimitExceededError(SecurityError):
    """A rendering asked for more than its limits allow."""


class RefusedError(jinja2.TemplateError):
    """The template called ``raise_exception``; the message is its own."""


class ToolArguments(dict[str, Any]):
    """Arguments of an earlier tool call, as a template sees them: a mapping that prints as its JSON text.

    Some templates walk over the arguments, others paste them as text. This serves both, without a second level of
    quotes: it is a mapping to tests, loops and ``tojson``, and its JSON text to ``{{ }}``, ``+`` and ``~``.
    """

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        super().__init__(arguments)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: str) -> str:
        return self.text + other

    def __radd__(self, other: str) -> str:
        return other + self.text


class _Meter:
    def __init__(self, limits: RenderLimits, now: datetime) -> None:
        self.limits = limits
        self.now = now
        self._work_left = limits.work
        self._deadline = time.monotonic() + limits.seconds
        # Sizes of containers by identity; holding the container keeps its identity from being used again.
        self._sizes: dict[int, tuple[object, int]] = {}

    def spend(self, units: int) -> None:
        self._work_left -= units
        if self._work_left < 0:
            raise LimitExceededError("the template works for too long; does it loop without end?")
        if time.monotonic() > self._deadline:
            raise LimitExceededError(f"the template took more than {self.limits.seconds:g} seconds")

    def check(self, size: int) -> None:
        if size > self.limits.size:
            raise LimitExceededError(f"the template makes a value of more than {self.limits.size} characters")

    def size(self, value: object) -> int:
        """Characters of `value` with everything in it, counted as often as it would be printed."""
        if isinstance(value, str):
            size = len(value)
        elif isinstance(value, list | tuple | dict):
            known = self._sizes.get(id(value))
            if known is not None:
                return known[1]
            items: Iterable[Any] = value
            if isinstance(value, dict):
                items = (part for item in value.items() for part in item)
            size = 2 + sum(2 + self.size(item) for item in items)
            if isinstance(value, ToolArguments):
                size += len(value.text)
            self._sizes[id(value)] = (value, size)
        elif isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
            raise LimitExceededError(f"the template makes a number of more than {_MAX_INTEGER_BITS} bits")
        else:
            size = 8
        self.check(size)
        return size

    def admit(self, value: object) -> None:
        """Count a step and what it made."""
        self.size(value)
        self.spend(_STEP + _length(value) * (1 if isinstance(value, str) else _ITEM))


_meter: ContextVar[_Meter] = ContextVar("template_meter")


@contextmanager
def metering(limits: RenderLimits, now: datetime | None = None) -> Iterator[None]:
    """Within this block, templates are compiled and rendered against one budget, and ``strftime_now`` tells `now`."""
    token = _meter.set(_Meter(limits, now or datetime.now()))
    try:
        yield
    finally:
        _meter.reset(token)


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | range) else 1


def _bounded_join(separator: str, items: Iterable[object]) -> None:
    meter, total = _meter.get(), 0
    for item in items:
        total += meter.size(item) + len(separator)
        meter.check(total)


def _bounded_replace(text: str, old: object, new: object) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _meter.get().check(len(text) + text.count(old) * len(new))


def _bounded_format(text: str, has_width: bool, values: Iterable[object]) -> None:
    if has_width:
        raise SecurityError("the template formats a value to a width that is not a small constant")
    meter = _meter.get()
    meter.check(len(text) + (text.count("%") + text.count("{")) * (_MAX_WIDTH + sum(map(meter.size, values))))


def _bounded_percent(text: str, values: Iterable[object]) -> None:
    _bounded_format(text, _PERCENT_WIDTH.search(text) is not None, values)


def _bounded_braces(text: str, values: Iterable[object]) -> None:
    specifications = (field[2] for field in string.Formatter().parse(text))
    _bounded_format(text, any(spec and _BRACE_WIDTH.search(spec) for spec in specifications), values)


def _bounded_width(text: object, width: object) -> None:
    width = 4 if width is None else width  # the filters' own defaults are smaller still
    if isinstance(width, int) and abs(width) > _MAX_WIDTH:
        raise SecurityError(f"the template asks for a width of {width}; at most {_MAX_WIDTH} is allowed")
    columns = width if isinstance(width, int) else _length(width)
    _meter.get().check(_length(text) + (text.count("\n") + 1 if isinstance(text, str) else 1) * columns)


def _check_filter(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse what a filter would make too large, before it does."""

    def argument(position: int, keyword: str) -> Any:
        return args[position] if len(args) > position else kwargs.get(keyword)

    if name == "replace":  # its first argument is the evaluation context
        _bounded_replace(str(args[1]), argument(2, "old"), argument(3, "new"))
    elif name == "format":
        _bounded_percent(str(args[0]), (*args[1:], *kwargs.values()))
    elif name == "indent":
        _bounded_width(args[0], argument(1, "width"))
    elif name == "round":
        _bounded_width("", argument(1, "precision"))


def _bounded_filter_join(
    environment: TemplateEnvironment, value: Iterable[Any], d: object = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = (functools.reduce(environment.getitem, str(attribute).split("."), item) for item in value)
    items, separator = [environment.to_text(item) for item in value], str(d)
    _bounded_join(separator, items)
    return separator.join(items)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``json.dumps`` without the escapes for HTML that Jinja2's own filter adds, in the order of insertion."""
    _bounded_width("", 0 if indent is None else indent)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )
    meter, pieces, total = _meter.get(), [], 0
    for piece in encoder.iterencode(value):
        total += len(piece)
        meter.check(total)
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: object = "") -> NoReturn:
    raise RefusedError(str(message)[:_MAX_MESSAGE])


def _strftime_now(format: str) -> str:
    _bounded_width("", len(format))
    return _meter.get().now.strftime(format)


class _OpaqueNamespace(Namespace):
    """``namespace()``, whose printed form does not show what it holds: it could hold itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format", "groupby",
    "indent", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "title", "trim", "unique",
    "upper", "wordcount",
)  # fmt: skip

_ATTRIBUTES: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset({
        "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
        "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join",
        "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition",
        "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
    })),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (list, frozenset({"copy", "count", "index"})),
    (tuple, frozenset({"count", "grouper", "index", "list"})),  # the named ones are those of a `groupby` group
    (LoopContext, frozenset({
        "changed", "cycle", "depth", "depth0", "first", "index", "index0", "last", "length", "nextitem", "previtem",
        "revindex", "revindex0",
    })),
    (Macro, frozenset({"arguments", "caller", "catch_kwargs", "catch_varargs", "name"})),
)  # fmt: skip


class _Metering(NodeTransformer):
    """Rewrite a template's syntax tree so that what makes values or repeats work goes through the environment."""

    @staticmethod
    def _call(method: str, node: nodes.Node, *args: nodes.Node) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(method), list(args), [], None, None)
        call.set_lineno(node.lineno)
        return call

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._call("metered", node, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return self._call("concatenate", node, *node.nodes)

    def _admitted(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or (
            isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice)
        ):
            return node
        return self._call("admit", node, node)

    visit_List = visit_Tuple = visit_Dict = visit_Getitem = _admitted


class _GenerationBlock(Extension):
    """``{% generation %}``: marks, for training, what the assistant wrote. Here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of all chat templates. Use it within `metering`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
            finalize=self.to_text,
        )
        self.filters = {name: self._metered_filter(name, self.filters[name]) for name in _FILTERS}
        self.filters["join"] = self._metered_filter("join", jinja2.pass_environment(_bounded_filter_join))
        self.filters["tojson"] = self._metered_filter("tojson", _tojson)
        self.globals = {
            "dict": dict,
            "namespace": _OpaqueNamespace,
            "raise_exception": _raise_exception,
            "range": self.globals["range"],
            "strftime_now": _strftime_now,
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        metered = _Metering().visit(source)
        metered.set_environment(self)
        return super()._generate(metered, *args, **kwargs)

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            _meter.get().spend(_STEP + sum(map(_length, args)))
            _check_filter(name, args, kwargs)
            return self.admit(function(*args, **kwargs))

        return run

    def admit(self, value: Any) -> Any:
        """`value`, after its size was checked and counted.

        What is lazy is drawn here, so that nothing can hide in it: a view becomes a list, and an iterator one over a
        list (it is still true when it is empty, and used up once).
        """
        if isinstance(value, KeysView | ValuesView | ItemsView):
            value = list(value)
        elif isinstance(value, Iterator):
            items = list(self.metered(value))
            _meter.get().admit(items)
            return iter(items)
        _meter.get().admit(value)
        return value

    def metered(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """The items of `iterable`, each at the cost of a step."""
        meter = _meter.get()
        for item in iterable:
            meter.spend(_STEP)
            yield item

    def to_text(self, value: object) -> str:
        """What ``{{ value }}`` prints."""
        if isinstance(value, str):
            return value
        _meter.get().admit(value)
        return str(value)

    def concatenate(self, *values: object) -> str:
        """The operator ``~``."""
        return self.concat([self.to_text(value) for value in values])

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the output of a macro, a call block or a block assignment."""
        pieces = list(pieces)
        _bounded_join("", pieces)
        text = "".join(pieces)
        _meter.get().admit(text)
        return text

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Only what is listed: templates work on data, loops, macros and namespaces."""
        if attr.startswith("_"):
            return False
        return next((attr in names for kind, names in _ATTRIBUTES if isinstance(obj, kind)), isinstance(obj, Namespace))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` in the sandbox, with its widths bounded."""
        sandboxed = super().wrap_str_format(value)
        if sandboxed is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _bounded_braces(value.__self__, (*args, *kwargs.values()))
            return sandboxed(*args, **kwargs)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An intercepted operator, its result checked, and its operands before where they could multiply."""
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _meter.get().check(_meter.get().size(sequence) * count)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > _MAX_INTEGER_BITS:
                raise LimitExceededError(f"the template makes a number of more than {_MAX_INTEGER_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            _bounded_percent(left, (right,))
        return self.admit(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call from the template: of a macro, a method of a value, a loop (recursion) or a global."""
        meter = _meter.get()
        owner = getattr(__obj, "__self__", None)
        if owner is __self:  # what `_Metering` put there counts for itself; a loop's items are drawn one by one
            return super().call(__context, __obj, *args, **kwargs)
        meter.check(sum(map(meter.size, (*args, *kwargs.values()))))
        meter.spend(_STEP + _length(owner) + sum(map(_length, args)))
        if isinstance(__obj, LoopContext) and args:
            args = (__self.metered(args[0]), *args[1:])
        elif isinstance(owner, str) and __obj.__name__ == "join" and args:
            args = (list(args[0]), *args[1:])
            _bounded_join(owner, args[0])
        elif isinstance(owner, str) and __obj.__name__ == "replace" and len(args) > 1:
            _bounded_replace(owner, args[0], args[1])
        return __self.admit(super().call(__context, __obj, *args, **kwargs))


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The output of `template`, within the limits of the surrounding `metering`."""
    meter, pieces, total = _meter.get(), [], 0
    for piece in template.generate(variables):
        total += len(piece)
        meter.check(total)
        meter.spend(len(piece))
        pieces.append(piece)
    return "".join(pieces)
