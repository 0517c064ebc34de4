"""Five schemas whose texts are bounded, so that a random model completes them, and a judge of what it wrote."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

SCHEMAS: dict[str, dict[str, Any]] = {
    "nested objects": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 10},
            "home": {
                "type": "object",
                "properties": {
                    "street": {"type": "string", "maxLength": 8},
                    "place": {
                        "type": "object",
                        "properties": {
                            "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                            "known": {"type": "boolean"},
                        },
                        "required": ["zip", "known"],
                        "additionalProperties": False,
                    },
                },
                "required": ["place"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "home"],
        "additionalProperties": False,
    },
    "enumerations": {
        "type": "object",
        "properties": {
            "color": {"enum": ["red", "green", "blue", 7, None, True]},
            "kind": {"const": "tree"},
            "size": {"type": "string", "enum": ["small", "large", 'extra "large" \u00e9']},
        },
        "required": ["color", "kind", "size"],
        "additionalProperties": False,
    },
    "bounded arrays": {
        "type": "array",
        "minItems": 2,
        "maxItems": 4,
        "items": {
            "type": "array",
            "prefixItems": [{"type": "integer", "minimum": 0, "maximum": 9}],
            "items": {"enum": ["x", "yy"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "numbers and patterns": {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": -5, "maximum": 130},
            "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 4, "multipleOf": 0.25},
            "code": {"type": "string", "pattern": "^[A-Z]{2,3}-[0-9a-f]{1,4}$"},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["age", "share", "code", "day"],
        "additionalProperties": False,
    },
    "references and alternatives": {
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/digit"}, "y": {"$ref": "#/$defs/digit"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
            "digit": {"type": "integer", "minimum": 0, "maximum": 9},
            "name": {"type": "string", "maxLength": 6},
        },
        "anyOf": [
            {"$ref": "#/$defs/point"},
            {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 2},
            {"anyOf": [{"$ref": "#/$defs/name"}, {"type": "null"}]},
        ],
    },
}


def fault(text: str, schema: dict[str, Any]) -> str | None:
    """Why a text is no JSON that is valid by the schema, or None."""
    try:
        value = json.loads(text)
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error)
    return None
