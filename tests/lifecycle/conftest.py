"""No lifecycle test may pass with an error in the log."""

import logging

import pytest


@pytest.fixture(autouse=True)
def no_errors_logged(caplog):
    yield
    for phase in ("setup", "call"):
        bad = [r.getMessage() for r in caplog.get_records(phase) if r.levelno >= logging.ERROR]
        assert not bad, bad
