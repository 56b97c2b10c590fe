"""JSON from outside: bounded in depth before it is parsed, and nothing that JSON doesn't have."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from cluster.errors import InvalidRequest

# A string that nobody closes goes to the text's end. Were it no match, each quote in it would be
# tried as a beginning, which takes the square of the text's length.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def parse(text: bytes, *, max_depth: int, what: str, field: str | None = None) -> Any:
    """Return the tree; raises InvalidRequest, which calls the text ``what``."""
    if _is_deeper(text, max_depth):
        reason = f"{what} is nested deeper than {max_depth} levels, or brackets are left open"
        raise InvalidRequest(reason, field=field)
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_no_constant)
    except (RecursionError, ValueError) as error:
        raise InvalidRequest(f"{what} is not valid JSON", field=field) from error


def _is_deeper(text: bytes, max_depth: int) -> bool:
    """Whether brackets nest deeper, outside of strings; those that don't close count as well."""
    brackets = _STRING.sub(b"", text).translate(_ONE_KIND, delete=_NOT_BRACKETS)
    for _ in range(max_depth):
        if not brackets:
            return False
        # Takes the innermost level of all that nests; the work is C's.
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
