"""What a model passes to a tool, checked before the tool sees it.

Decided here and only here (DE-02, DE-03): which input is refused, and that a refusal says what is wrong and in which
argument. It never repeats what was passed: that may be ten megabytes, or a secret.

Threading: `Inputs` is built once and only read afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import best_match

from fusefs.services.tooling import ToolResult

_NAME_CHARS = 100
"""Of an unknown tool's name."""


class BadInput(ValueError):
    """Arguments that a tool cannot take; the message is a clause for `tooling.invalid_input`."""


class Inputs:
    """The check of one tool's arguments.

    Args:
        schema: JSON Schema of the arguments, an object.
    """

    def __init__(self, schema: Mapping[str, object]) -> None:
        self._validator = Draft202012Validator(dict(schema))

    def check(self, arguments: object) -> dict[str, Any]:
        """The arguments as the tool takes them. Text is taken for JSON: some model servers pass it on as it came.

        Raises BadInput.
        """
        if isinstance(arguments, str | bytes):
            arguments = _parsed(arguments)
        if not isinstance(arguments, dict):
            raise BadInput("it is not a JSON object")
        found = best_match(self._validator.iter_errors(arguments))
        if found is not None:
            raise BadInput(_complaint(found))
        for key, value in arguments.items():
            if isinstance(value, str) and (problem := _unreadable(value)):
                raise BadInput(f"{key} {problem}")
        # JSON Schema takes 5.0 for an integer.
        return {key: int(value) if isinstance(value, float) else value for key, value in arguments.items()}


def _parsed(text: str | bytes) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"it is not valid JSON (line {error.lineno}, column {error.colno})") from None
    except (ValueError, RecursionError):
        raise BadInput("it is not valid JSON") from None


def _unreadable(value: str) -> str:
    """What makes a text none that a file can hold."""
    if "\0" in value:
        return "holds a NUL, which no text has; leave it out"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "holds half of a surrogate pair, which is no character; write the character itself"
    return ""


def _complaint(error: ValidationError) -> str:
    """What is wrong, from the schema alone: jsonschema's own text repeats the value."""
    where = ".".join(str(part) for part in error.absolute_path) or "the input"
    rule, wanted, schema = str(error.validator), error.validator_value, error.schema
    if rule == "type":
        return f"{where} must be of type {wanted}"
    if rule == "required":
        return f"{', '.join(_missing(wanted, error.instance))} is missing"
    if rule == "additionalProperties" and isinstance(schema, Mapping):
        return f"it takes only {', '.join(schema['properties'])}"
    if rule in ("minimum", "maximum", "minLength", "maxLength"):
        return f"{where} breaks the rule {rule} {wanted}"
    return f"{where} breaks the rule {rule}"


def _missing(required: Any, given: Any) -> list[str]:
    return [name for name in required if name not in given]


def unknown_tool(name: str, known: Iterable[str]) -> ToolResult:
    """The answer to a call of a tool that does not exist (DE-02)."""
    shown = ascii(name[:_NAME_CHARS])
    return ToolResult(f"There is no tool {shown}. The tools are: {', '.join(known)}.", is_error=True)
