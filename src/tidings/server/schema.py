"""JSON schemas of tools, and checking values against them.

`jsonschema` takes 1 ms to check a schema, which is a second for a thousand tools. So this module checks simple schemas
itself, and imports `jsonschema` only for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["find_schema_error", "find_violation"]

_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})


def find_schema_error(schema: Any) -> str | None:
    """Return the error in a schema, or None."""
    if _is_simple(schema):
        return None
    if not isinstance(schema, dict):
        return f"it is {schema!r:.60}"
    import jsonschema

    try:
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        return str(error.message)
    return None


def find_violation(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Return the location and the reason of a violation of the schema, or None.

    Raises `ValueError` if the schema can't be used.
    """
    import jsonschema
    from jsonschema.validators import validator_for
    from referencing.jsonschema import EMPTY_REGISTRY

    # A registry without retrieval: a reference in a schema must not make this process open a URL.
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)(schema, registry=EMPTY_REGISTRY)
    try:
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except Exception as failure:  # the library raises many types for a bad schema
        raise ValueError(str(failure)) from failure
    if error is None:
        return None
    location = "/".join(map(str, error.absolute_path))
    message = error.message if len(error.message) <= 300 else f"{error.message[:300]}…"
    return f"{location}: {message}" if location else message


def _is_simple(schema: Any) -> bool:
    """Return whether a schema is valid and only uses keywords that can be checked without `jsonschema`."""
    if not isinstance(schema, dict):
        return False
    for keyword, value in schema.items():
        match keyword:
            case "type":
                is_simple = isinstance(value, str) and value in _TYPES
            case "properties":
                is_simple = isinstance(value, dict) and all(map(_is_simple, value.values()))
            case "required":
                is_simple = _is_list_of_strings(value) and len(set(value)) == len(value)
            case "enum":
                is_simple = _is_list_of_strings(value)
            case "items":
                is_simple = _is_simple(value)
            case "title" | "description":
                is_simple = isinstance(value, str)
            case "additionalProperties":
                is_simple = isinstance(value, bool) or _is_simple(value)
            case _:
                is_simple = keyword == "default"
        if not is_simple:
            return False
    return True


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(element, str) for element in value)
