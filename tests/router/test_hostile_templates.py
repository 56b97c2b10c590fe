"""Chat templates and checkpoints that mean harm: bounded, refused, and nothing of them runs."""

import contextlib
import threading
import time

import pytest

from cluster.errors import PdserveError, RequestTooLarge
from router import chat_template
from router.chat_template import ChatTemplate
from router.messages import Chat, ChatMessage
from router.time_cap import Overtime, time_cap

CHAT = Chat(messages=(ChatMessage(role="user", content="hi"),))
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
HOSTILE = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "attr": "{{ messages|attr('__class__') }}",
    "a file": "{% include '/etc/passwd' %}",
    "a module": "{% import 'os' as os %}{{ os }}",
    "changes what it's given": "{{ messages.append(1) }}",
    "a long range": "{% for i in range(10**9) %}x{% endfor %}",
    "a long text": "{{ 'x' * 10**9 }}",
    "a text that doubles": "{{ ('x' * 2**19) * 2**19 }}",
    "a long list": "{{ [messages] * 10**9 }}",
    "a large number": "{{ 2 ** 10**9 }}",
    "no end": NESTED.replace("BODY", "xxxxxxxxxx"),
    "no end and no word": NESTED.replace("BODY", ""),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_templates_are_refused_within_their_time(kind, monkeypatch):
    """CASES S-09: whatever it is, a typed refusal comes soon."""
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.3)
    began = time.monotonic()
    with pytest.raises(PdserveError) as refused:
        ChatTemplate(HOSTILE[kind], {}).render(CHAT, max_chars=10_000)
    assert time.monotonic() - began < 2.0
    assert refused.value.http_status in (400, 413)


def test_a_template_may_reckon():
    source = (
        "{{ '-' * 3 }}{{ 2 ** 10 }}{{ 1000000 * 1000000 }}{{ 1.5 * 2 }}{{ messages[0].content }}"
    )
    assert ChatTemplate(source, {}).render(CHAT, max_chars=99) == "---102410000000000003.0hi"


def test_what_ends_in_time_is_left_alone_and_what_does_not_is_ended_once():
    for _ in range(50):
        with time_cap(5.0):
            pass
    with pytest.raises(Overtime):
        run_for_ever(0.05)
    for _ in range(200):
        with contextlib.suppress(Overtime), time_cap(0.0002):
            sum(range(500))
        sum(range(500))  # one that comes late would come here
    assert threading.active_count() < 60


def run_for_ever(seconds):
    with time_cap(seconds):
        while True:
            pass


def test_a_chat_that_takes_too_long_is_too_large():
    with pytest.raises(RequestTooLarge):
        ChatTemplate(HOSTILE["no end"], {}).render(CHAT, max_chars=100)
