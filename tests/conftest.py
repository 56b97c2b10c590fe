"""When a run of tests has to be over: slow ones that would begin later are skipped, and say so."""

import os
import time

import pytest

UNTIL = float(os.environ.get("SLOW_TESTS_UNTIL", "inf"))
"""Seconds since the epoch."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.get_closest_marker("slow") and time.time() > UNTIL:
        pytest.skip("there is no time left for it in this run")
