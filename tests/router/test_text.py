"""The tokenizer and what the router reads of a model folder; no torch anywhere near."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cluster.errors import InvalidRequest, RequestTooLarge, StartupError
from router.messages import Chat, ChatMessage
from router.served import served_model
from router.text import TextCodec
from tests.router.fakes import EOS_ID, make_codec, make_tokenizer

SYSTEM = ChatMessage(role="system", content="be kind")
USER = ChatMessage(role="user", content="hi")
CHAT = Chat(messages=(SYSTEM, USER))


@pytest.fixture
def folder(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    config = {"vocab_size": 260, "max_position_embeddings": 64, "eos_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_saved_folder_encodes_decodes_and_renders(folder):
    codec = TextCodec.load(folder, eos_ids=frozenset({ord("!")}))
    encoded = codec.encode("hé!")
    assert (encoded.ids, encoded.offsets) == (tuple("hé!".encode()), (0, 1, 1, 2))
    text = "[system]be kind[user]hi[assistant]"
    assert codec.encode_chat(CHAT, max_chars=100) == tuple(text.encode())
    assert codec.decode([*b"oh!", EOS_ID]) == "oh"


def test_truncation_in_a_folder_is_not_obeyed(folder):
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    tree["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    path.write_text(json.dumps(tree))
    codec = TextCodec.load(folder, eos_ids=frozenset())
    assert len(codec.encode("a long prompt").ids) == 13


def test_templates_that_are_missing_refuse_or_grow_too_long():
    codec = make_codec(template=None)
    with pytest.raises(InvalidRequest, match="no chat template"):
        codec.encode_chat(CHAT, max_chars=100)
    with pytest.raises(InvalidRequest, match="a system turn comes first"):
        make_codec().encode_chat(Chat(messages=(USER, SYSTEM)), max_chars=100)
    with pytest.raises(RequestTooLarge):
        make_codec().encode_chat(CHAT, max_chars=10)


def test_templates_run_in_a_sandbox():
    """S-09 in part: a template can't reach the interpreter."""
    codec = make_codec(template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest):
        codec.encode_chat(CHAT, max_chars=100)


def test_served_model_reads_names_and_limits(folder):
    model = served_model(folder, name="tiny", max_model_len=1000)
    assert (model.name, model.max_model_len, model.vocab_size) == ("tiny", 64, 260)
    assert model.eos_ids == {5}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert served_model(folder, name="tiny", max_model_len=32).eos_ids == {1, 2}
    assert served_model(folder, name="tiny", max_model_len=32).max_model_len == 32


@pytest.mark.parametrize("text", ["", "[]", "{", '{"vocab_size": "many"}'])
def test_a_folder_that_is_no_model_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartupError, match=r"config\.json"):
        served_model(tmp_path, name="x", max_model_len=8)
    with pytest.raises(StartupError, match="tokenizer"):
        TextCodec.load(tmp_path, eos_ids=frozenset())


def test_the_router_never_loads_torch(folder):
    """DESIGN §2: not even through a tokenizer, its chat template, or a worker's client."""
    code = (
        "import sys; from pathlib import Path\n"
        "import router.ingress\n"
        "from router.messages import Chat, ChatMessage\n"
        "from router.text import TextCodec\n"
        f"codec = TextCodec.load(Path({str(folder)!r}), eos_ids=frozenset())\n"
        "chat = Chat(messages=(ChatMessage(role='user', content='hi'),))\n"
        "codec.encode_chat(chat, max_chars=100)\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
