"""Work in child processes that are bound to one core and compute with one thread.

A child is ``python -m deploy.bench.pinned CORE MODULE ARGUMENTS``. It binds itself before it
imports MODULE, and so before any library starts a thread. ``MODULE.start(arguments)`` returns a
function; the child calls it for each message it reads from standard input and writes what it
returns to standard output, both one JSON object a line. It ends with its input, and so with its
parent.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
_END_S = 5.0


class PinnedChild:
    """One child, from entering ``with`` until leaving it."""

    def __init__(self, module: str, core: int, arguments: Mapping[str, Any]) -> None:
        self._module = module
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(core), module, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | _ONE_THREAD,
            # Ctrl-C is the parent's to handle.
            start_new_session=True,
        )

    def __enter__(self) -> PinnedChild:
        """Return the child itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the child; it is asked first unless something went wrong."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and a message never arrived
            self._process.stdin.close()
        try:
            self._process.wait(_END_S if kind is None else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def ask(self, **message: Any) -> Any:
        """Send a message and return the answer; raises StartupError where the child has failed."""
        self.send(**message)
        return self.answer()

    def send(self, **message: Any) -> None:
        """Send a message; its ``answer`` is to be read before the next one."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None

    def answer(self) -> Any:
        """Wait for the answer to the last message."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        return json.loads(line)

    def _failed(self) -> StartupError:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        reason = lines[-1] if lines else "it said nothing"
        return StartupError(f"{self._module} ended with code {code}: {reason}")


def main(core: str, module: str, arguments: str) -> None:
    """Bind this process to ``core``, then answer messages until the input ends."""
    os.sched_setaffinity(0, {int(core)})
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    respond = importlib.import_module(module).start(json.loads(arguments))
    for line in sys.stdin:
        answers.write(json.dumps(respond(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
