"""Where the processes of a cluster on this machine log: a file each in the run folder."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_PACKAGES = ("cluster", "prefill_worker", "decode_worker", "router", "deploy")
_MAX_BYTES, _NUM_OLD = 16 << 20, 2
_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def log_to_file(folder: Path, name: str) -> None:
    """Write what our packages log, from INFO on, to ``folder/NAME.log``; old parts are dropped.

    Ray's own logs are left alone. To be called once in a process.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = RotatingFileHandler(
        folder / f"{name}.log", maxBytes=_MAX_BYTES, backupCount=_NUM_OLD, encoding="utf-8"
    )
    handler.setFormatter(logging.Formatter(_FORMAT))
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
