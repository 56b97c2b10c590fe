"""The Python client against a gRPC door with scripted workers behind it."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from cluster import errors
from cluster.wire import public_v1_pb2 as pb
from deploy.client import KEY_VARIABLE, Client
from router.auth import Keys
from router.grpc_api import GrpcDoor
from router.service import Door
from tests.router.fakes import EOS_ID, FakeCluster, make_router, speaks, until

KEY = "sk-acme-0123456789"


@contextlib.contextmanager
def door(*, keys: Keys | None = None, is_silent: bool = False):
    """Serve on a loop in a thread; yields the address."""
    ready, address = threading.Event(), []
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve():
        cluster = FakeCluster()
        cluster.script = None if is_silent else speaks([*b"ok", EOS_ID])
        service = make_router(cluster, door=Door(keys=keys or Keys()))
        grpc_door = GrpcDoor(service, host="127.0.0.1", port=0)
        address.append(f"127.0.0.1:{await grpc_door.start()}")
        ready.set()
        await stop.wait()
        await until(lambda: service.dispatcher.num_open == 0)
        await grpc_door.stop()
        await service.stop()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait(10)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def test_it_generates_from_whatever_a_prompt_may_be():
    with door() as address, Client(address) as client:
        client.connect()
        for source in (
            {"prompt": "hi"},
            {"prompt": [104, 105]},
            {"prompt_ids": {"ids": [104, 105]}},
            {"messages": [("user", "hi")]},
            {"messages": [pb.Message(role="user", parts=["h", "i"])]},
        ):
            pieces = list(client.generate(**source))
            assert "".join(piece.text for piece in pieces) == "ok"
            assert pieces[-1].usage.completion_tokens == 3
        answer = client.generate_once(prompt=["ab", "cd"], n=2)
        assert [choice.text for choice in answer.choices] == ["ok"] * 4
        assert client.generate_once(prompt=[[1], [2, 3]]).usage.prompt_tokens == 3


def test_it_takes_a_prompt_or_messages_and_drops_neither():
    with Client("127.0.0.1:1") as client:
        both = {"prompt": "hi", "messages": [("user", "hi")]}
        for ask in (client.generate_once, client.tokenize, lambda **b: next(client.generate(**b))):
            with pytest.raises(errors.InvalidRequest, match="either prompt or messages"):
                ask(**both)


def test_it_asks_for_everything_else():
    with door() as address, Client(address) as client:
        assert client.tokenize(prompt="hé") == list("hé".encode())
        assert bytes(client.tokenize(messages=[("user", "hi")])) == b"[user]hi[assistant]"
        assert client.detokenize(list("hé".encode())) == "hé"
        assert [model.id for model in client.models()] == ["tiny"]
        assert {worker.worker_id for worker in client.cluster().workers} == {"p0", "d0"}
        views = client.watch_cluster()
        assert next(views).num_routers == 1
        views.close()
        assert not client.cancel("nobody")


def test_errors_are_typed_with_their_field_and_time():
    with door() as address, Client(address) as client:
        with pytest.raises(errors.InvalidRequest, match="temperature") as caught:
            client.generate_once(prompt="hi", temperature=9.0)
        assert caught.value.field == "temperature"
        with pytest.raises(errors.ModelNotFound):
            next(client.generate(prompt="hi", model="other"))
    with Client("127.0.0.1:1") as client, pytest.raises(errors.NoWorker):
        client.connect(timeout_s=0.2)


def test_deadlines_and_cancels():
    """Leaving a stream stops its work; so do deadlines, and both kinds of ids."""
    with door(is_silent=True) as address, Client(address) as client:
        with pytest.raises(errors.DeadlineExceeded):
            client.generate_once(prompt="hi", deadline_s=0.1)
        with pytest.raises(errors.DeadlineExceeded):
            list(client.generate(prompt="hi", timeout_s=0.1))
        failed = []

        def generate():
            try:
                client.generate_once(prompt="hi", client_request_id="mine")
            except errors.PdserveError as error:
                failed.append(error)

        thread = threading.Thread(target=generate)
        thread.start()
        while not client.cancel(client_request_id="mine"):
            assert thread.is_alive()
        thread.join(10)
        assert isinstance(failed[0], errors.Cancelled)


def test_keys_come_from_the_argument_or_the_environment(monkeypatch):
    with door(keys=Keys({KEY: "acme"})) as address:
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        with Client(address) as client, pytest.raises(errors.Unauthenticated):
            client.models()
        with Client(address, api_key=KEY) as client:
            assert client.generate_once(prompt="hi").choices[0].text == "ok"
        monkeypatch.setenv(KEY_VARIABLE, KEY)
        with Client(address) as client:
            assert client.models()
            assert list(client.generate(prompt="hi"))
