"""The proof refuses an answer that proves nothing."""

import dataclasses
import http.server
import json
import threading

import pytest

from cluster import config as deploy_config
from cluster.errors import StartupError
from deploy import proof
from deploy.proof import Answer

PAIR = [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"}]
MIXED = [{"name": "mixed", "role": "mixed", "count": 2}]


def make_config(pools=PAIR, path="trial", http_port=8000):
    return deploy_config.from_tree(
        {
            "pools": pools,
            "model": {"path": path, "name": "m"},
            "endpoints": {"http_port": http_port},
        }
    )


def make_timeline(*, num_bytes=1024, num_steps=3):
    return {
        "prefill_worker": "prefill-0", "decode_worker": "decode-0", "reason": "only pair",
        "queue_s": 0.0, "first_token_s": 0.1, "total_s": 0.2,
        "prefill": {
            "compute_s": 0.1, "queue_s": 0.0, "reserve_wait_s": 0.0, "transfer_s": 0.0,
            "transfer_bytes": num_bytes, "exposed_s": 0.0,
        },
        "decode": {"compute_s": 0.1, "num_steps": num_steps},
    }  # fmt: skip


LOCAL = make_timeline(num_bytes=0) | {"prefill_worker": "decode-0"}


def make_answer(**changes):
    fields = {"text": "Paris.", "finish_reason": "stop", "timeline": make_timeline()}
    return Answer(**(fields | changes))


@pytest.mark.parametrize(
    ("config", "answer", "lack"),
    [
        (make_config(), make_answer(), ""),
        (make_config(), make_answer(text=" \n"), "no text"),
        (make_config(), make_answer(finish_reason=None), "finish_reason"),
        (make_config(), make_answer(timeline=None), "timeline"),
        (make_config(), make_answer(text="London."), "Paris"),
        (make_config(path="/other"), make_answer(text="London."), ""),
        (make_config(), make_answer(timeline=make_timeline(num_bytes=0)), "no KV went"),
        (make_config(), make_answer(timeline=LOCAL), ""),
        (make_config(MIXED), make_answer(timeline=make_timeline(num_bytes=0)), ""),
        (make_config(), make_answer(timeline=make_timeline(num_bytes=0, num_steps=0)), ""),
    ],
)
def test_what_an_answer_lacks(config, answer, lack):
    found = proof.what_lacks(config, answer)
    assert lack in found
    assert bool(lack) == bool(found)


def event(text=None, finish_reason=None, **more):
    choice = {"delta": {"content": text}, "finish_reason": finish_reason}
    return {"choices": [choice], **more}


@pytest.fixture
def door():
    """An HTTP door that answers as it is told; keeps the paths it was asked for."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.server.paths.append(self.path)
            status, body = self.server.answers.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.paths, server.answers = [], []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def stream_of(*events):
    lines = [f"data: {json.dumps(each)}\n\n" for each in events]
    return 200, "".join([*lines, "data: [DONE]\n\n"])


def config_of(door, **options):
    return make_config(http_port=door.server_address[1], **options)


def test_a_whole_answer_is_shown_with_its_timeline(door, capsys, monkeypatch):
    """Also where the environment names a proxy that leads nowhere."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    door.answers.append(
        stream_of(
            event("It is "),
            event("Paris."),
            event(None, "stop", pdserve={"timeline": make_timeline()}),
        )
    )
    assert proof.prove(config_of(door)) == "It is Paris."
    shown = capsys.readouterr().out
    assert "It is Paris." in shown
    assert "prefill-0 -> decode-0" in shown


def test_a_model_without_chats_is_asked_plainly(door):
    door.answers.append((400, '{"error": {"message": "this model has no chat template"}}'))
    text = {
        "choices": [{"text": "Paris", "finish_reason": "stop"}],
        "pdserve": {"timeline": make_timeline()},
    }
    door.answers.append(stream_of(text))
    assert proof.prove(config_of(door)) == "Paris"
    assert door.paths == ["/v1/chat/completions", "/v1/completions"]


def test_a_cluster_with_keys_needs_one_for_its_proof(door, monkeypatch):
    """The variable that must hold it is named before anything is started, or where it is wrong."""
    auth = deploy_config.AuthConfig(keys_env="KEYS")
    keyed = dataclasses.replace(config_of(door), auth=auth)
    monkeypatch.delenv("PDSERVE_API_KEY", raising=False)
    proof.check_key(make_config())
    with pytest.raises(StartupError, match="set PDSERVE_API_KEY"):
        proof.check_key(keyed)
    monkeypatch.setenv("PDSERVE_API_KEY", "sk-0123456789")
    proof.check_key(keyed)
    door.answers.append((401, "{}"))
    with pytest.raises(StartupError, match="PDSERVE_API_KEY is none of the keys"):
        proof.prove(keyed)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((503, '{"error": {"message": "no worker"}}'), "no worker"),
        (stream_of(event("Pa"), {"error": {"message": "worker lost"}}), "worker lost"),
        (stream_of(event("Paris")), "finish_reason"),
        (stream_of(event(None, "stop", pdserve={"timeline": make_timeline()})), "no text"),
    ],
)
def test_a_bad_answer_fails_the_proof(answer, reason, door):
    door.answers.append(answer)
    with pytest.raises(StartupError, match=f"the proof failed: .*{reason}"):
        proof.prove(config_of(door))


@pytest.mark.parametrize(("num_bytes", "lack"), [(4096, ""), (0, "no KV went")])
def test_a_longer_prompt_proves_the_handoff_where_the_question_was_too_short(
    num_bytes, lack, door, capsys
):
    end = event(None, "length", pdserve={"timeline": make_timeline(num_bytes=num_bytes)})
    door.answers += [
        stream_of(event("Paris."), event(None, "stop", pdserve={"timeline": LOCAL})),
        stream_of(event("and then"), end),
    ]
    if lack:
        with pytest.raises(StartupError, match=lack):
            proof.prove(config_of(door))
    else:
        assert proof.prove(config_of(door)) == "Paris."
    assert door.paths == ["/v1/chat/completions", "/v1/completions"]
    assert "and then" not in capsys.readouterr().out


def test_a_context_too_short_for_a_longer_prompt_is_no_failure(door):
    door.answers.append(
        stream_of(event("Paris."), event(None, "stop", pdserve={"timeline": LOCAL}))
    )
    config = config_of(door)
    model = dataclasses.replace(config.model, max_model_len=66)  # 65 and two tokens are one more
    assert proof.prove(dataclasses.replace(config, model=model)) == "Paris."


def test_where_all_are_computed_where_they_are_decoded_nothing_is_asked_for(door):
    door.answers.append(
        stream_of(event("Paris."), event(None, "stop", pdserve={"timeline": LOCAL}))
    )
    config = config_of(door)
    scheduling = dataclasses.replace(
        config.scheduling, local_prefill=deploy_config.LocalPrefill.ALWAYS
    )
    assert proof.prove(dataclasses.replace(config, scheduling=scheduling)) == "Paris."
