"""The allocator's settings: taken where it is glibc's, and said where it is not."""

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
