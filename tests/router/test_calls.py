"""Several prompts and choices in one call: started, numbered, counted and ended together."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import Cancelled, EngineFault
from cluster.handoff import AbortCause
from cluster.request import FinishReason, LegKind
from router.calls import Call, CallEvents, CallPlan, CallPrompt, Calls, Shows, client_name
from router.events import Finish
from router.given import Caller, GenerateInput
from router.service import Door
from tests.router.doors import events_of, grpc_request, open_doors
from tests.router.fakes import (
    EOS_ID,
    FakeCluster,
    assert_conserved,
    make_router,
    metric,
    speaks,
    until,
)

A, B, C = b"abc"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def cluster():
    return FakeCluster()


@pytest.fixture
async def service(cluster):
    service = make_router(cluster)
    yield service
    await service.stop()


def prefills(cluster):
    return [leg for w in cluster.connections for leg in w.legs if leg.kind is LegKind.PREFILL]


async def read(call):
    """Return the finishes by index; raises what the call ended with."""
    finishes = {}
    while len(finishes) < call.num_all_choices:
        event = await call.next()
        if isinstance(event, Finish):
            assert event.index not in finishes, "a choice ends once"
            finishes[event.index] = event
    return finishes


def say(worker, leg, *ids, **ends):
    worker.say(*ids, key=leg.key, **ends)


async def test_later_choices_start_when_the_first_has_its_first_token(cluster, service):
    """One prefill, its KV shared: the others find it in the prefix cache."""
    call = await service.generate(GenerateInput(prompt="hello", n=3, seed=5, max_tokens=2))
    prefill, decode = await cluster.started("p0", "d0")
    for _ in range(20):
        await asyncio.sleep(0)
    assert [leg.key.choice for leg in prefill.legs] == [0]

    say(prefill, prefill.legs[0], A)
    await until(lambda: len(prefill.legs) == 3)
    assert [leg.key.choice for leg in prefill.legs] == [0, 1, 2]
    assert len({leg.key.request_id for leg in prefill.legs}) == 3
    assert {leg.params.seed for leg in prefill.legs} == {5}, "noise differs by choice"
    here = prefill.peer.incarnation
    assert [want.cached_on for want in cluster.route.wants] == ["", here, here]

    for leg in prefill.legs[1:]:
        say(prefill, leg, B)
    await until(lambda: len(decode.legs) == 3)
    for leg in decode.legs:
        say(decode, leg, A if leg.key.choice == 0 else B, C, finish=FinishReason.LENGTH)
        say(prefill, next(p for p in prefill.legs if p.key == leg.key), ends=True)
    assert len(await read(call)) == 3
    assert_conserved(service)


@pytest.mark.parametrize(
    ("prompt", "n", "num_prompt_tokens"),
    [("hello", 3, 5), (["ab", "cde"], 2, 5), ([[1], [2]], 1, 2)],
)
async def test_a_call_is_one_request_to_clients_and_counters(
    cluster, service, prompt, n, num_prompt_tokens
):
    """P-08, P-29: the prompt counts once, each choice's output once; one received, one success."""
    cluster.script = speaks([A, B, EOS_ID])
    given = GenerateInput(prompt=prompt, n=n, tools=None)
    call = await service.generate(given)
    num_choices = call.num_all_choices
    assert num_choices == (1 if isinstance(prompt, str) else len(prompt)) * n
    finishes = await read(call)
    assert sorted(finishes) == list(range(num_choices))
    assert call.num_prompt_tokens == num_prompt_tokens
    await until(lambda: metric(service, "pdserve_requests_in_flight") == 0)
    assert metric(service, "pdserve_requests_received_total") == 1
    assert metric(service, "pdserve_requests_success_total") == 1
    assert metric(service, "pdserve_prompt_tokens_total") == num_prompt_tokens
    assert metric(service, "pdserve_generated_tokens_total") == 3 * num_choices
    assert_conserved(service)


async def test_choices_are_numbered_by_prompt_first(cluster, service):
    cluster.script = speaks([A, EOS_ID])
    call = await service.generate(GenerateInput(prompt=["ab", "cde"], n=2))
    await read(call)
    legs = {leg.key.request_id.removeprefix(call.request_id): leg for leg in prefills(cluster)}
    assert {suffix: (len(leg.prompt_ids), leg.key.choice) for suffix, leg in legs.items()} == {
        "": (2, 0),
        "-1": (2, 1),
        "-2": (3, 0),
        "-3": (3, 1),
    }
    assert (call.prompt_of(1).ids, call.prompt_of(2).ids) == (tuple(b"ab"), tuple(b"cde"))


async def test_cancel_stops_every_choice(cluster, service):
    """P-11: those that run, and those that have not started."""
    cluster.script = lambda worker, leg: (
        say(worker, leg, A)
        if leg.kind is LegKind.PREFILL and leg.prompt_ids[0] == ord("a")
        else None
    )
    call = await service.generate(GenerateInput(prompt=["ab", "cd"], n=2))
    await until(lambda: len(prefills(cluster)) == 3)
    call.cancel()
    with pytest.raises(Cancelled):
        await read(call)
    await until(lambda: service.dispatcher.num_open == 0)
    assert len(prefills(cluster)) == 3, "the last never started"
    aborted = {key for worker in cluster.connections for key, _ in worker.aborts}
    causes = {cause for worker in cluster.connections for _, cause in worker.aborts}
    assert aborted == {leg.key for leg in prefills(cluster)}
    assert causes == {AbortCause.CANCELLED}
    assert metric(service, "pdserve_requests_aborted_total") == 1
    assert_conserved(service)


class _Generation:
    """One choice whose reader is told what a test says."""

    def __init__(self, counter):
        self.events = asyncio.Queue()
        self.counter = counter
        counter.started()

    async def next(self):
        return await self.events.get()

    def cancel(self):
        pass

    def finish(self):
        finish = Finish(
            text="",
            finish_reason=FinishReason.STOP,
            num_prompt_tokens=1,
            num_output_tokens=1,
            timeline=None,
        )
        self.events.put_nowait(finish)
        self.counter.ended(finish, phase="decode", num_output_tokens=1)


async def test_a_call_that_is_cancelled_between_its_choices_is_no_success(service):
    """The first choice has ended well, the second has not started: the reader is told."""
    generations, over = [], []

    def submit(counter):
        generations.append(_Generation(counter))
        return generations[-1]

    plan = CallPlan(
        request_id="r",
        client_request_id="",
        caller=Caller(),
        prompts=(CallPrompt(ids=(1,)),),
        num_choices=2,
        shows=Shows(),
        remaining_s=9.0,
        accepted=lambda index, counter, cached_on: counter,
    )
    service.metrics.received()
    call = Call(plan, submit=submit, metrics=service.metrics, on_over=over.append)
    call.start()
    generations[0].finish()
    assert call.cancel()
    with pytest.raises(Cancelled):
        await read(call)
    assert (len(generations), over) == (1, [call])
    assert metric(service, "pdserve_requests_aborted_total") == 1
    assert_conserved(service)


async def test_one_choice_that_fails_ends_the_call(cluster, service):
    """W: no answer with a choice missing."""

    def script(worker, leg):
        if leg.prompt_ids[0] == ord("b"):
            say(worker, leg, error=EngineFault("a step failed"))

    cluster.script = script
    call = await service.generate(GenerateInput(prompt=["ab", "b"], n=2))
    with pytest.raises(EngineFault):
        await read(call)
    await until(lambda: service.dispatcher.num_open == 0)
    assert metric(service, "pdserve_requests_failed_total") == 1
    assert metric(service, "pdserve_requests_success_total") == 0
    assert_conserved(service)


async def test_choices_over_http_and_grpc(cluster):
    """P-08: each choice has one finish; usage is the same whole, streamed, and over gRPC."""
    cluster.script = speaks([*b"ok", EOS_ID])
    async with open_doors(make_router(cluster)) as doors:
        for given in ({"prompt": ["ab", "cde"], "n": 2}, {"messages": HI, "n": 3}):
            whole = (await doors.post(given)).json()
            indexes = [choice["index"] for choice in whole["choices"]]
            assert indexes == list(range(len(indexes)))
            options = {"stream": True, "stream_options": {"include_usage": True}}
            response = await doors.post({**given, **options, "timeline": True})
            *chunks, last, done = [data for _, data in events_of(response.text)]
            assert (done, last["choices"], last["usage"]) == ("[DONE]", [], whole["usage"])
            assert len(last["pdserve"]["timelines"]) == len(indexes)
            assert all(chunk["usage"] is None for chunk in chunks)
            ended = [c["choices"][0] for c in chunks if c["choices"][0]["finish_reason"]]
            assert sorted(choice["index"] for choice in ended) == indexes
            texts = dict.fromkeys(indexes, "")
            for chunk in chunks:
                (choice,) = chunk["choices"]
                text = choice["delta"].get("content") if "delta" in choice else choice["text"]
                texts[choice["index"]] += text or ""
            assert set(texts.values()) == {"ok"}

            answer = await doors.once(given)
            assert [choice.index for choice in answer.choices] == indexes
            assert {choice.text for choice in answer.choices} == {"ok"}
            usage = whole["usage"]
            assert answer.usage.prompt_tokens == usage["prompt_tokens"]
            assert answer.usage.completion_tokens == usage["completion_tokens"]
        assert_conserved(doors.service)


async def test_too_many_choices_for_the_router_are_refused_before_work(cluster):
    service = make_router(cluster, max_open_calls=4)
    async with open_doors(service) as doors:
        verdict = await doors.http_verdict({"prompt": "hello", "n": 5})
        assert (verdict.status, verdict.param) == (400, "n")
        call = await service.generate(GenerateInput(prompt="hello"))
        verdict = await doors.http_verdict({"prompt": "hello", "n": 4})
        assert verdict.status == 503
        assert await doors.grpc_verdict({"prompt": "hello", "n": 4}) == verdict
        call.cancel()
        await until(lambda: service.dispatcher.num_open == 0)
        assert_conserved(service)


async def test_a_handler_that_is_cancelled_as_its_call_begins_stops_it(
    cluster, service, monkeypatch
):
    """P-10: nobody will read it, and nobody else knows of it."""
    generate = service.generate
    asking = None

    async def begin(given, caller):
        call = await generate(given, caller)
        asking.cancel()
        return call

    monkeypatch.setattr(service, "generate", begin)
    async with open_doors(service) as doors:
        asking = asyncio.create_task(doors.post({"prompt": "hello", "n": 2}))
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: service.dispatcher.num_open == 0)
        assert_conserved(service)


# ---- cancelling by id


async def test_a_client_cancels_by_its_own_id(cluster, service):
    """Only within its tenant; ids may be reused, and then all of them are meant."""
    ours, theirs = Caller("a", "key-0"), Caller("b", "key-1")
    given = GenerateInput(prompt="hello", client_request_id="mine")
    calls = [await service.generate(given, ours) for _ in range(2)]
    await cluster.started("p0", "d0")
    assert not await service.cancel_by_client_id("mine", theirs)
    assert cluster.route.cancel_asked == [client_name("b", "mine")], "another router may have it"
    assert "mine" not in cluster.route.cancel_asked[0]
    assert await service.cancel_by_client_id("mine", ours)
    for call in calls:
        with pytest.raises(Cancelled):
            await read(call)
    await until(lambda: service.dispatcher.num_open == 0)
    assert not await service.cancel_by_client_id("mine", ours)
    assert_conserved(service)


async def test_the_name_of_another_tenants_id_is_no_request_id(cluster, service):
    """S-05: anybody can make the name, which is no secret."""
    given = GenerateInput(prompt="hello", client_request_id="mine")
    call = await service.generate(given, Caller("a", "key-0"))
    await cluster.started("p0", "d0")
    assert not await service.cancel(client_name("a", "mine"))
    assert cluster.route.cancel_asked == [], "nor does another router hear of it"
    assert await service.cancel(call.request_id)


async def test_an_order_of_the_control_plane_cancels_calls_by_either_name(cluster):
    calls = Calls()
    service = make_router(cluster, door=Door(calls=calls))
    events = CallEvents(calls, service.dispatcher)
    for name in ("own", "ours"):
        given = GenerateInput(prompt="hello", n=2, client_request_id="mine")
        call = await service.generate(given)
        order = client_name("", "mine") if name == "own" else call.request_id
        assert events.on_cancel(order)
        with pytest.raises(Cancelled):
            await read(call)
        await until(lambda: service.dispatcher.num_open == 0)
        assert not events.on_cancel(order)
    assert not events.on_cancel("nobody")
    await service.stop()


async def test_ids_of_clients_are_echoed_and_checked_at_both_doors(cluster):
    cluster.script = speaks([A])
    async with open_doors(make_router(cluster)) as doors:
        headers = {"x-client-request-id": "mine"}
        response = await doors.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert response.headers["x-client-request-id"] == "mine"
        request = {"prompt": "a", "client_request_id": "mine"}
        call = doors.stub.Generate(grpc_request(request))
        assert dict(await call.initial_metadata())["x-client-request-id"] == "mine"
        async for _ in call:
            pass
        for bad in ("x" * 129, "a\tb"):
            headers = {"x-client-request-id": bad}
            response = await doors.http.post(
                "/v1/completions", json={"prompt": "a"}, headers=headers
            )
            assert response.json()["error"]["param"] == "client_request_id"
            verdict = await doors.grpc_verdict({"prompt": "a", "client_request_id": bad})
            assert (verdict.status, verdict.param) == (400, "client_request_id")


async def test_the_first_token_of_a_call_is_that_of_its_first_choice(cluster, service):
    """P-29: a later choice begins where the first has its first token; the client waited less."""
    cluster.script = None
    call = await service.generate(GenerateInput(prompt="hello", max_tokens=2, n=2))
    prefill, decode = await cluster.started("p0", "d0")
    say(prefill, prefill.legs[0], A, ends=True)
    await until(lambda: len(decode.legs) == 2)
    say(decode, decode.legs[0], A, B, finish=FinishReason.LENGTH)
    await asyncio.sleep(0.12)
    say(prefill, prefill.legs[1], A, ends=True)
    say(decode, decode.legs[1], A, B, finish=FinishReason.LENGTH)
    await read(call)
    await until(lambda: metric(service, "pdserve_requests_in_flight") == 0)
    assert metric(service, "pdserve_first_token_seconds_count") == 1
    assert metric(service, "pdserve_first_token_seconds_sum") < 0.1
    assert metric(service, "pdserve_request_seconds_sum") > 0.1
    assert_conserved(service)
