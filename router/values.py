"""Checks of single values, for both doors: of what type, from where to where, how many.

Messages name the field and the rule, never more of the value than its type. ``None`` is absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.errors import InvalidRequest

INT64 = range(-(1 << 63), 1 << 63)
_MAX_ID_DIGITS = 12


def string(value: object, field: str) -> str:
    """Return a string that UTF-8 can carry."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} must be a string", field=field)
    return encodable(value, field)


def encodable(text: str, field: str) -> str:
    """Return ``text``, unless it holds half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} holds half a character", field=field) from error
    return text


def short_string(value: object, field: str, *, max_chars: int) -> str | None:
    """Return a string of 1 to ``max_chars`` characters; None where absent."""
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= max_chars:
        raise InvalidRequest(
            f"{field} must be a string of 1 to {max_chars} characters", field=field
        )
    return encodable(value, field)


def boolean(value: object, field: str) -> bool:
    """Return a flag; absent is false."""
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidRequest(f"{field} must be true or false", field=field)
    return value


def integer(value: object, field: str, *, low: int, high: int = INT64[-1]) -> int | None:
    """Return an integer of ``low`` to ``high``; None where absent."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{field} must be an integer", field=field)
    if not low <= value <= high:
        is_open = high == INT64[-1] and value < low
        rule = f"at least {low}" if is_open else f"from {low} to {high}"
        raise InvalidRequest(f"{field} must be {rule}", field=field)
    return value


def number(value: object, field: str, *, low: float, high: float) -> float | None:
    """Return a finite number of ``low`` to ``high``; None where absent."""
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequest(f"{field} must be a number", field=field)
    # Written so that NaN, which is false in every comparison, fails too.
    if not low <= value <= high:
        raise InvalidRequest(f"{field} must be from {low:g} to {high:g}", field=field)
    return float(value)


def listed(value: object, field: str, *, what: str, low: int, high: int) -> Sequence[object]:
    """Return a list of ``low`` to ``high`` things, which ``what`` names."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequest(f"{field} must be a list of {what}", field=field)
    if not low <= len(value) <= high:
        raise InvalidRequest(f"{field} holds {low} to {high} {what}", field=field)
    return value


def token_ids(value: object, field: str, *, vocab_size: int, max_ids: int) -> tuple[int, ...]:
    """Return at most ``max_ids`` ids that the model's embedding has a row for; () where absent."""
    if value is None:
        return ()
    ids = listed(value, field, what="token ids", low=0, high=max_ids)
    return known_ids(ids, field, vocab_size=vocab_size)


def known_ids(ids: Sequence[object], field: str, *, vocab_size: int) -> tuple[int, ...]:
    """Return ids, each an integer with a row in the model's embedding."""
    checked = tuple(i for i in ids if type(i) is int and 0 <= i < vocab_size)
    if len(checked) != len(ids):
        raise InvalidRequest(f"token ids are integers from 0 to {vocab_size - 1}", field=field)
    return checked


def logit_bias(
    value: object, *, vocab_size: int, max_entries: int
) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) by id; JSON names ids by strings of digits."""
    field = "logit_bias"
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{field} must map token ids to numbers", field=field)
    if len(value) > max_entries:
        raise InvalidRequest(f"{field} holds {max_entries} entries at most", field=field)
    entries = []
    for key, bias in value.items():
        checked = number(bias, field, low=-100.0, high=100.0)
        if checked is None:
            raise InvalidRequest(f"{field} must map token ids to numbers", field=field)
        entries.append((_token_id(key, vocab_size), checked))
    return tuple(sorted(entries))


def _token_id(key: object, vocab_size: int) -> int:
    token_id = key
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS:
        token_id = int(key)
        if str(token_id) != key:  # 7 and 07 would be two entries for one token
            token_id = None
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise InvalidRequest(
            f"logit_bias: token ids are integers from 0 to {vocab_size - 1}", field="logit_bias"
        )
    return token_id
