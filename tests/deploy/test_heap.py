"""The allocator's settings: taken where it is glibc's, and said where not; the collector's."""

import ctypes
import subprocess
import sys

from deploy import heap


def test_glibc_takes_the_settings():
    # In a process of its own: they last as long as the process.
    script = "from deploy.heap import keep_freed_memory as keep; raise SystemExit(not keep())"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_another_allocator_is_told_of(monkeypatch, caplog):
    def no_library(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert not heap.keep_freed_memory()
    assert "not glibc" in caplog.text


def test_what_start_made_is_not_looked_at_again():
    script = """
import gc
from deploy.heap import keep_what_start_made
keep_what_start_made()
raise SystemExit(not gc.get_freeze_count() > 1000 or len(gc.get_objects()) > 1000)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
