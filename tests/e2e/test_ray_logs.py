"""What clients write is in no log of Ray's and Serve's processes either (S-17)."""

import httpx
import pytest

from cluster import errors
from deploy.client import Client
from deploy.run_state import RunState
from tests.e2e.plain_cluster import is_quiet, wait_until

pytestmark = pytest.mark.ray

WORDS = ("xylophonist", "quagmire")
MARKER = " ".join(WORDS)


def holding(folder, words) -> list[str]:
    """The files under a folder in which one of the words stands."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            found += [str(path) for word in words if word.encode() in content]
    return found


def test_no_log_of_rays_holds_words_of_a_prompt(on_ray):
    """Good calls and bad ones, over both doors; then every file that the cluster has written."""
    good = {"model": "tiny", "max_tokens": 4, "prompt": MARKER, "user": WORDS[0]}
    calls = [
        (good | {"stream": True}, 200),
        (good | {"temperature": MARKER}, 400),
        (good | {"prompt": f"{MARKER} " * 500}, 400),
        (good | {"model": WORDS[1]}, 404),
        (good | {"timeout_s": 1e-3}, 504),
    ]
    for body, status in calls:
        answer = httpx.post(f"{on_ray.http}/v1/completions", json=body, timeout=30)
        assert answer.status_code == status, body
    with Client(on_ray.grpc) as client:
        assert list(client.generate(prompt=MARKER, max_tokens=4))
        with pytest.raises(errors.InvalidRequest):
            list(client.generate(prompt=MARKER, stop=[MARKER] * 9))
    wait_until(lambda: is_quiet(on_ray), 20, "work goes on")
    state = RunState(on_ray.config.endpoints.control_port)
    assert holding(state.folder, ["request="]), "no log was found"
    assert holding(state.folder, WORDS) == []
    assert not any(word in httpx.get(f"{on_ray.http}/metrics").text for word in WORDS)
    assert not any(word in line for word in WORDS for line in on_ray.lines)
