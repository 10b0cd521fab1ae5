"""What a Python function's annotations say about the torch operator that it becomes."""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

import torch

from ..lowering import table
from ..runtime import dtypes

_NUMBERS = {int: "int", float: "float", bool: "bool", str: "str"}
_TENSOR, _OPTIONAL, _TENSORS = "tensor", "tensor?", "tensors"
STATIC = "static"


@dataclass(frozen=True)
class Parameter:
    """One parameter of the function.

    Attributes:
        kind: "tensor", "tensor?" (may be None), "tensors" (a list) or "static" (part of the program).
        schema: its type in torch's schema language.
        default: its default, or inspect.Parameter.empty.
        keyword: it is given by keyword only.
        choices: the class, where the caller gives a member of an enum and the operator takes the member's name.
    """

    name: str
    kind: str
    schema: str
    default: Any = inspect.Parameter.empty
    keyword: bool = False
    choices: type[enum.Enum] | None = None

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


def plain(parameter: Parameter) -> Parameter:
    """The parameter as operators that stand beside the user's have it: positional, required, as torch hands it on."""
    return Parameter(parameter.name, parameter.kind, parameter.schema)


Layout = tuple[Any, ...]  # what the arguments are besides arrays; hashable


@dataclass(frozen=True)
class Signature:
    """Parameters and results of an operator.

    Attributes:
        returns: "one" tensor, "many" (a tuple of `results`), "list" or "none".
        results: how many tensors the function returns, where that is fixed.
    """

    parameters: tuple[Parameter, ...]
    returns: str
    results: int

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments of a call in the order of the parameters, with the defaults."""
        names = [each.name for each in self.parameters]
        given = dict(zip(names, args))
        given.update(kwargs)
        return [given.get(each.name, each.default) for each in self.parameters]

    def split(self, arguments: Sequence[Any]) -> tuple[list[Any], Layout]:
        """The arrays (or tensors) among the arguments, and a hashable description of all else."""
        arrays: list[Any] = []
        layout: list[Any] = []
        for parameter, value in zip(self.parameters, arguments, strict=True):
            if parameter.kind == STATIC:
                layout.append(_static(value))
            elif parameter.kind == _TENSORS:
                layout.append(tuple(item is not None for item in value))
                arrays += [item for item in value if item is not None]
            else:
                layout.append(value is not None)
                arrays += [] if value is None else [value]
        return arrays, tuple(layout)

    def join(self, arrays: Sequence[Any], layout: Layout) -> list[Any]:
        """The inverse of `split`."""
        rest = iter(arrays)
        arguments: list[Any] = []
        for parameter, item in zip(self.parameters, layout, strict=True):
            if parameter.kind == STATIC:
                value = item[1]
                arguments.append(list(value) if isinstance(value, tuple) else value)
            elif parameter.kind == _TENSORS:
                arguments.append([next(rest) if there else None for there in item])
            else:
                arguments.append(next(rest) if item else None)
        return arguments

    def call(self, fn: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Calls the function the way it wants its parameters."""
        positional = [v for p, v in zip(self.parameters, arguments) if not p.keyword]
        named = {p.name: v for p, v in zip(self.parameters, arguments) if p.keyword}
        for parameter, value in zip(self.parameters, arguments):
            if parameter.choices is not None and value is not None:
                member = parameter.choices[value]
                if parameter.keyword:
                    named[parameter.name] = member
                else:
                    positional[self.parameters.index(parameter)] = member
        return fn(*positional, **named)


def _static(value: Any) -> tuple[Any, Any]:
    """1, 1.0 and True are equal but not the same program."""
    if isinstance(value, torch.dtype):
        value = dtypes.to_numpy(value)
    if isinstance(value, list | tuple):
        return tuple(type(item) for item in value), tuple(value)
    return type(value), value


def of(fn: Callable[..., Any], name: str) -> Signature:
    """The signature of an annotated function.

    Raises:
        TypeError: an annotation is missing, or of a type that no operator has.
    """
    try:
        signature = inspect.signature(fn)
    except ValueError as error:
        raise TypeError(f"jax_op {name}: {fn!r} has no signature to read ({error}); wrap it in an annotated function "
                        "of your own") from error
    hints = _hints(fn, name)
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"jax_op {name}: *{parameter.name} has no fixed number of arguments, and an operator needs "
                            "one; take a list[jax.Array]")
        if parameter.name in table.PLACEMENT:
            raise TypeError(f"jax_op {name}: the parameter name {parameter.name!r} means where a result lives in "
                            "PyTorch's operators; use another")
        if parameter.name not in hints:
            raise TypeError(f"jax_op {name}: parameter {parameter.name!r} has no annotation; write what it is, for "
                            f"example {parameter.name}: jax.Array")
        kind, text, choices = _parameter(hints[parameter.name], name, parameter.name)
        default = parameter.default
        if isinstance(default, enum.Enum):
            default = default.name
        parameters.append(Parameter(parameter.name, kind, text, default, parameter.kind is parameter.KEYWORD_ONLY,
                                    choices))
    if "return" not in hints:
        raise TypeError(f"jax_op {name}: the function has no return annotation; write -> jax.Array, or "
                        "-> tuple[jax.Array, jax.Array] for several results")
    returns, results = _returns(hints["return"], name)
    return Signature(tuple(parameters), returns, results)


def _hints(fn: Callable[..., Any], name: str) -> dict[str, Any]:
    plain: Any = fn
    while hasattr(plain, "func") and not inspect.isfunction(plain):  # functools.partial
        plain = plain.func
    plain = inspect.unwrap(plain)
    try:
        return typing.get_type_hints(plain)
    except NameError as error:
        raise TypeError(f"jax_op {name}: an annotation names something that its module does not have ({error}); import "
                        "it there, at run time") from error


def _is_tensor(hint: Any) -> bool:
    import jax

    return hint in (jax.Array, torch.Tensor)


def _optional(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        rest = [item for item in typing.get_args(hint) if item is not type(None)]
        if len(rest) < len(typing.get_args(hint)) and len(rest) == 1:
            return rest[0], True
    return hint, False


def _items(hint: Any) -> Any:
    """The type of a list's items; None for what is no list of one type."""
    import collections.abc

    origin, given = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, collections.abc.Sequence) and len(given) == 1:
        return given[0]
    if origin is tuple and len(given) == 2 and given[1] is Ellipsis:
        return given[0]
    return None


def _parameter(hint: Any, op: str, name: str) -> tuple[str, str, type[enum.Enum] | None]:
    plain, optional = _optional(hint)
    mark = "?" if optional else ""
    if _is_tensor(plain):
        return (_OPTIONAL if optional else _TENSOR), f"Tensor{mark}", None
    if plain in _NUMBERS:
        return STATIC, _NUMBERS[plain] + mark, None
    if plain is torch.dtype:
        return STATIC, "ScalarType" + mark, None
    if inspect.isclass(plain) and issubclass(plain, enum.Enum):
        return STATIC, "str" + mark, plain
    if typing.get_origin(plain) is Literal:
        kinds = {type(value) for value in typing.get_args(plain)}
        if len(kinds) == 1 and (only := kinds.pop()) in _NUMBERS:
            return STATIC, _NUMBERS[only] + mark, None
    item = _items(plain)
    if item is not None and not optional and _is_tensor(_optional(item)[0]):
        return _TENSORS, "Tensor?[]" if _optional(item)[1] else "Tensor[]", None
    if item in (int, float, bool):
        return STATIC, f"{_NUMBERS[item]}[]{mark}", None
    raise TypeError(f"jax_op {op}: parameter {name!r} is annotated {hint!r}; an operator takes jax.Array or "
                    "torch.Tensor, also Optional or in a list, and int, float, bool, str, torch.dtype, Literal, Enum, "
                    "lists of numbers")


def _returns(hint: Any, op: str) -> tuple[str, int]:
    if hint is None or hint is type(None):
        return "none", 0
    if _is_tensor(hint):
        return "one", 1
    if typing.get_origin(hint) is tuple and Ellipsis not in typing.get_args(hint):
        given = typing.get_args(hint)
        if given and all(_is_tensor(item) for item in given):
            return "many", len(given)
    if _is_tensor(_items(hint)):
        return "list", -1
    raise TypeError(f"jax_op {op}: the function is annotated to return {hint!r}; an operator returns jax.Array, a "
                    "tuple of them of fixed length, or list[jax.Array]")


def schema(signature: Signature, mutated: Sequence[str] = ()) -> str:
    """Arguments and results in torch's schema language: "(Tensor x, float eps=1e-05) -> Tensor".

    Args:
        mutated: parameters that the operator writes; their new values are among the function's results, and not
            returned.
    """
    parts: list[str] = []
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    keyword = False
    for parameter in signature.parameters:
        if parameter.keyword and not keyword:
            keyword = True
            parts.append("*")
        type_ = f"Tensor({next(letters)}!)" if parameter.name in mutated else parameter.schema
        default = "" if parameter.required else f"={_literal(parameter.default)}"
        parts.append(f"{type_} {parameter.name}{default}")
    left = signature.results - len(mutated)
    if signature.returns == "list":
        result = "Tensor[]"
    elif left == 1:
        result = "Tensor"
    else:
        result = "(" + ", ".join(["Tensor"] * left) + ")"
    return f"({', '.join(parts)}) -> {result}"


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, torch.dtype):
        raise TypeError("a torch.dtype cannot be a default; use Optional[torch.dtype] = None")
    return repr(value)
