"""What a client is told of an error: its own mistakes in full, of ours only what and where.

Messages from inside name workers, hosts and addresses; those stay in the logs.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from cluster.errors import (
    IN_STEP,
    Cancelled,
    ClusterFull,
    DeadlineExceeded,
    HandoffFailed,
    NoWorker,
    QueueFull,
    WorkerLost,
)

if TYPE_CHECKING:
    from cluster.errors import PdserveError

_UNTOLD = "an internal error"
_TEXTS: dict[type[PdserveError], str] = {
    ClusterFull: "too many requests are waiting; try again later",
    QueueFull: "this caller has its share of what waits already; try again later",
    Cancelled: "the request was cancelled",
    WorkerLost: "a worker was lost; try again",
    HandoffFailed: "the KV of this request was lost between two workers; try again",
    NoWorker: "no worker can take the request now; try again later",
    DeadlineExceeded: "the deadline passed",
}
_STAGES = frozenset(
    {
        "edge",
        "queue",
        "placement",
        "intake",
        "prefill",
        "handoff",
        "link",
        "transfer",
        "decode queue",
        "decode",
        "engine",
        IN_STEP,
        "sample",
        "cancel",
    }
)
"""All that a request goes through: no other name that some worker tells is passed on."""

_TOLD_AT: dict[type[PdserveError], frozenset[str]] = {
    NoWorker: frozenset({"edge", "placement"}),
    ClusterFull: frozenset({"edge"}),
    QueueFull: frozenset({"edge"}),
}
"""Stages at which these say what is lacking, and why if a worker was refused: they name nobody."""


def public_message(error: PdserveError) -> str:
    """Return the text for a client, over HTTP and gRPC alike."""
    text = _text(error)
    return f"{text} (stage: {error.stage})" if error.stage in _STAGES else text


def _text(error: PdserveError) -> str:
    if error.stage in _TOLD_AT.get(type(error), ()):
        return f"{error.message}; try again later"
    for kind, text in _TEXTS.items():
        if isinstance(error, kind):
            return text
    return error.message if error.http_status < HTTPStatus.INTERNAL_SERVER_ERROR else _UNTOLD
