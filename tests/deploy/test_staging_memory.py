"""What a link's staging buffer leaves in a process that keeps freed memory."""

import subprocess
import sys

STORY = """
from pathlib import Path
from cluster.transport.staging import StagedChannel, TransferLimits
from deploy.heap import keep_freed_memory

class Silent:
    def close(self): ...

def held():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10

assert keep_freed_memory()
before = held()
link = StagedChannel(Silent(), TransferLimits(), "cpu")
opened = held()
link.close()
print(opened - before, held() - before)
"""


def test_a_closed_link_gives_its_buffer_back_to_the_kernel():
    """CASES P-23: with a malloc that keeps what is freed, each dead link would leave a hole."""
    told = subprocess.run(
        [sys.executable, "-c", STORY], capture_output=True, text=True, check=True, timeout=60
    )
    opened, closed = (int(word) for word in told.stdout.split())
    assert opened >= 16 << 20
    assert closed < 2 << 20
