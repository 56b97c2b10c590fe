"""What a client is told of an error: its own mistakes in full, of ours only what and where.

Messages from inside name workers, hosts and addresses; those stay in the logs.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from cluster.errors import (
    Cancelled,
    DeadlineExceeded,
    HandoffFailed,
    NoWorker,
    QueueFull,
    WorkerLost,
)

if TYPE_CHECKING:
    from cluster.errors import PdserveError

_TEXTS: dict[type[PdserveError], str] = {
    QueueFull: "too many requests are waiting; try again later",
    Cancelled: "the request was cancelled",
    WorkerLost: "a worker was lost; try again",
    HandoffFailed: "the KV of this request was lost between two workers; try again",
    NoWorker: "no worker can take the request now; try again later",
    DeadlineExceeded: "the deadline passed",
}
_STAGES = frozenset(
    {"edge", "queue", "placement", "intake", "prefill", "handoff", "link", "decode", "cancel"}
)

_SAFE_STAGES = frozenset({"edge", "placement"})
"""There a NoWorker says what is lacking, and why if a worker was refused: it names nobody."""


def public_message(error: PdserveError) -> str:
    """Return the text for a client, over HTTP and gRPC alike."""
    text = next((text for kind, text in _TEXTS.items() if isinstance(error, kind)), None)
    if isinstance(error, NoWorker) and error.stage in _SAFE_STAGES:
        text = f"{error.message}; try again later"
    if text is None:
        if error.http_status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return error.message
        text = "an internal error"
    return f"{text} (stage: {error.stage})" if error.stage in _STAGES else text
