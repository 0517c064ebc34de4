"""The Jinja environment of chat templates: what the templates of Hugging Face are written for, in Jinja's sandbox, with
a meter.

Jinja's sandbox keeps a template from reaching Python; it does not keep it from using all memory or time. So a parsed
template is rewritten before it is compiled: loops, outputs, joins and slices go through filters that charge a meter, as
do calls, filters and operators that can make much out of little.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn, cast

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

METER = "\0meter"  # a name that no template can write
_OWN_ROOM = 1 << 22  # characters and elements that a template may make of nothing
_ROOM_A_CHARACTER = 32  # and for each character that it is given
_OWN_SECONDS = 0.5  # of the thread's own time, in which all garbage may be collected, too
_SECONDS_A_CHARACTER = 1e-5  # and for each character that it is given
_ELEMENT = 8  # characters that an element of a list takes the room of
_MAX_BITS = 1 << 14  # of an integer
_MAX_INDENT = 16
_WIDE = re.compile(r"\d{5}")  # a width or precision that no prompt needs
_NESTED_WIDTH = re.compile(r"\{[^{}]*\{|%[^a-zA-Z%]*\*")
# They pad to any width, or serve web pages; no template of a model is known to use one.
_WITHOUT = {
    "batch",
    "center",
    "filesizeformat",
    "forceescape",
    "pprint",
    "random",
    "slice",
    "urlize",
    "wordwrap",
    "xmlattr",
}


class Meter:
    """What one rendering may still use: characters and elements made, and seconds of its thread."""

    def __init__(self, given: Any) -> None:
        self._limit = self._room = 1 << 62
        self._seconds = self._end = float("inf")
        self.weigh(given)
        characters = self._limit - self._room
        self._limit = self._room = _OWN_ROOM + _ROOM_A_CHARACTER * characters
        self._seconds = _OWN_SECONDS + _SECONDS_A_CHARACTER * characters
        self._end = time.thread_time() + self._seconds

    def charge(self, amount: int) -> None:
        """TemplateRuntimeError where more has been made than may be."""
        self._room -= amount
        if self._room < 0:
            raise TemplateRuntimeError(f"it makes more than {self._limit} characters")

    def tick(self) -> None:
        """TemplateRuntimeError where the time is up."""
        if time.thread_time() > self._end:
            raise TemplateRuntimeError(f"it takes longer than {self._seconds:.1f} s")

    def weigh(self, value: Any) -> None:
        """Charges for all that a value would be written as; lists may hold one another many times over."""
        left, seen = [value], 0
        while left:
            item = left.pop()
            seen += 1
            if isinstance(item, str):
                self.charge(len(item))
            elif isinstance(item, Mapping):
                left.extend(item.keys())
                left.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                left.extend(item)
            elif isinstance(item, int) and item.bit_length() > _MAX_BITS:
                raise TemplateRuntimeError("a number is too large")
            self.charge(_ELEMENT)
            if seen % 256 == 0:
                self.tick()

    def sized(self, value: Any) -> Any:
        """The value, charged for its own size."""
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, list | tuple | dict):
            self.charge(_ELEMENT * len(value))
        return value

    def text(self, value: Any) -> str:
        """The value as text, charged."""
        if not isinstance(value, str):
            self.weigh(value)
            value = str(value)
        self.charge(len(value))
        return cast(str, value)

    def fields(self, template: str, arguments: Any) -> None:
        """Charges for a format string with its arguments; a width that no prompt needs is refused."""
        if _WIDE.search(template) or _NESTED_WIDTH.search(template):
            raise TemplateRuntimeError("a width in a format is too large")
        self.charge(len(template))
        self.weigh(arguments)


def _of(context: Context) -> Meter:
    return cast(Meter, context.parent[METER])


# -- what the rewritten template calls -------------------------------------------------------------------------------


@pass_context
def _each(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    meter = _of(context)
    for item in items:
        meter.tick()
        meter.charge(1)
        yield item


@pass_context
def _emit(context: Context, value: Any) -> str:
    return _of(context).text(value)


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    meter = _of(context)
    return "".join([meter.text(value) for value in values])


@pass_context
def _sized(context: Context, value: Any) -> Any:
    return _of(context).sized(value)


_METERED = {"\0each": _each, "\0emit": _emit, "\0concat": _concat, "\0sized": _sized}


class _Rewriter(NodeTransformer):
    def _through(self, name: str, node: nodes.Expr) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._through("\0each", cast(nodes.Expr, node.iter))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [self._through("\0emit", self._constant(child)) for child in node.nodes]
        return node

    def _constant(self, node: nodes.Expr) -> nodes.Expr:
        return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return self._through("\0concat", nodes.List(node.nodes, lineno=node.lineno))

    def _measured(self, node: nodes.Expr) -> nodes.Filter:
        self.generic_visit(node)
        return self._through("\0sized", node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        if isinstance(node.arg, nodes.Slice):
            return self._measured(node)
        self.generic_visit(node)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Filter:
        return self._measured(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Expr:
        if node.node is None:  # {% filter %} takes its block's text
            self.generic_visit(node)
            return node
        return self._measured(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        for child in (*node.call.iter_child_nodes(), *node.args, *node.defaults):
            self.visit(child)
        node.body = [self.visit(child) for child in node.body]
        return node

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> nodes.FilterBlock:
        node.body = [self.visit(child) for child in node.body]
        return node


# -- what can make much out of little --------------------------------------------------------------------------------


def _before_method(meter: Meter, text: str, name: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Charges for what a method of a string will make."""
    meter.charge(len(text))
    if name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        widths = [value for value in (*arguments, *named.values()) if isinstance(value, int)]
        meter.charge(max([*widths, 0]) * (1 + text.count("\t")))
    elif name == "replace" and len(arguments) > 1:
        _before_replace(meter, text, arguments[0], arguments[1])
    elif name == "join" and arguments and isinstance(arguments[0], list | tuple):
        meter.weigh(arguments[0])
        meter.charge(len(text) * len(arguments[0]))
    elif name in ("format", "format_map"):
        meter.fields(text, [arguments, named])
    elif name == "translate":
        raise TemplateRuntimeError("translate is not supported")


def _before_replace(meter: Meter, text: str, old: Any, new: Any) -> None:
    meter.charge(len(text) + text.count(str(old)) * len(str(new)))


@pass_context
def _replace(context: Context, value: Any, old: str, new: str, count: int | None = None) -> str:
    meter = _of(context)
    text = meter.text(value)
    _before_replace(meter, text, old, new)
    return text.replace(str(old), str(new), -1 if count is None else count)


def _chosen(context: Context, items: Iterable[Any], attribute: str | int | None) -> Iterator[Any]:
    """The items, or of each what ``attribute`` names, which may be a path with dots."""
    metered = _each(context, items)
    return metered if attribute is None else map(make_attrgetter(context.environment, attribute), metered)


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    meter = _of(context)
    items = list(_chosen(context, value, attribute))
    separator = meter.text(d)
    meter.charge(len(separator) * len(items))
    return separator.join([meter.text(item) for item in items])


@pass_context
def _indent(context: Context, s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    meter = _of(context)
    text = meter.text(s)
    meter.charge((width if isinstance(width, int) else len(width)) * (1 + text.count("\n")))
    return cast(str, FILTERS["indent"](text, width, first, blank))


@pass_context
def _format(context: Context, value: str, *args: Any, **kwargs: Any) -> str:
    _of(context).fields(str(value), [args, kwargs])
    return cast(str, FILTERS["format"](value, *args, **kwargs))


@pass_context
def _list(context: Context, value: Iterable[Any]) -> list[Any]:
    return list(_each(context, value))


@pass_context
def _string(context: Context, value: Any) -> str:
    return _of(context).text(value)


@pass_context
def _sum(context: Context, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    sandbox, total = cast(_Sandbox, context.environment), start
    for item in _chosen(context, iterable, attribute):
        total = sandbox.call_binop(context, "+", total, item)
    return total


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > 99:
        raise TemplateRuntimeError("a precision is too large")
    return FILTERS["round"](value, precision, method)


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML, which would change the prompt
    width = len(indent) if isinstance(indent, str) else indent
    if width is not None and not (isinstance(width, int) and width <= _MAX_INDENT):
        raise TemplateRuntimeError(f"tojson indents by at most {_MAX_INDENT}")
    _of(context).weigh(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_GUARDED: dict[str, Callable[..., Any]] = {
    "replace": _replace,
    "join": _join,
    "indent": _indent,
    "format": _format,
    "list": _list,
    "string": _string,
    "sum": _sum,
    "round": _round,
    "tojson": _tojson,
}


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here its body is all there is to it."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return cast(nodes.Template, _Rewriter().visit(super()._parse(source, name, filename)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _of(context)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise TemplateRuntimeError("a number is too large")
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(times, int):
                    meter.charge((1 if isinstance(items, str) else _ELEMENT) * len(items) * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            meter.fields(left, right)
        elif operator == "+":
            # a template may be written for arguments of calls as a text, as OpenAI's clients have them
            if isinstance(left, str) and isinstance(right, dict):
                right = _tojson(context, right)
            elif isinstance(left, dict) and isinstance(right, str):
                left = _tojson(context, left)
            meter.sized(left)
            meter.sized(right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _of(context)
        meter.tick()
        meter.charge(1)
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _before_method(meter, owner, method.__name__, args, kwargs)
        return super().call(context, obj, *args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRuntimeError(message)


@cache
def environment() -> ImmutableSandboxedEnvironment:
    """The one environment; a template compiled in it is rendered with a `Meter` under the name METER."""
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters = {name: found for name, found in made.filters.items() if name not in _WITHOUT} | _GUARDED | _METERED
    del made.globals["lipsum"]
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made
