"""API keys: read without a trace, compared in constant time, and asked for everywhere."""

from __future__ import annotations

import contextlib
import hmac
import logging

import grpc
import pytest
from fastapi.routing import APIRoute
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.config import AuthConfig, LimitsConfig
from cluster.errors import QueueFull, StartupError, Unauthenticated
from cluster.policy.tiers import Tiers
from cluster.wire import public_v1_pb2 as pb
from router import auth
from router.api import build_api
from router.auth import Keys
from router.given import ANYBODY, Caller, GenerateInput
from router.http_auth import OPEN_PATHS
from router.service import Door
from tests.router.doors import open_doors
from tests.router.fakes import (
    FakeCluster,
    assert_conserved,
    make_router,
    metric,
    speaks,
    until,
)

KEY, OTHER = "sk-acme-0123456789", "sk-beta-0123456789"
KEYS = Keys({KEY: "acme", OTHER: "beta"})
BEARER = {"authorization": f"Bearer {KEY}"}
TIERS = Tiers(names=("low", "normal", "high"), default="normal")
METADATA = (("authorization", f"Bearer {KEY}"),)


@pytest.fixture
async def cluster():
    cluster = FakeCluster()
    cluster.script = speaks([*b"ok"])
    return cluster


@pytest.fixture
async def service(cluster):
    return make_router(cluster, door=Door(keys=KEYS))


@pytest.fixture
async def doors(service):
    async with open_doors(service) as doors:
        yield doors


# ---- where keys come from


def test_keys_come_from_a_file_and_the_environment(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# tenants\n\nacme = {KEY}\nacme=sk-acme-second\n")
    config = AuthConfig(keys_file=str(path), keys_env="KEYS")
    keys = Keys.load(config, {"KEYS": f"beta={OTHER},gamma=sk-gamma-01234"})
    tenants = [keys.caller(f"Bearer {key}").tenant for key in (KEY, "sk-acme-second", OTHER)]
    assert tenants == ["acme", "acme", "beta"]
    assert keys.caller(f"bEaReR {KEY}") != keys.caller("Bearer sk-acme-second"), "keys differ"
    assert KEY not in repr(vars(keys)), "only hashes stay"


def test_a_key_may_give_its_tenant_a_tier_and_a_ceiling(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"acme:low:normal={KEY}\nbeta::high={OTHER}\n")
    keys = Keys.load(AuthConfig(keys_file=str(path)))
    callers = [keys.caller(f"Bearer {key}") for key in (KEY, OTHER)]
    assert [(c.tenant, c.tier, c.ceiling) for c in callers] == [
        ("acme", "low", "normal"),
        ("beta", "", "high"),
    ]
    keys.check_tiers(TIERS)
    with pytest.raises(StartupError, match=r"acme.*'low'.*scheduling\.tiers"):
        keys.check_tiers(Tiers(names=("normal", "high"), default="normal"))


def test_nothing_set_lets_everybody_in():
    keys = Keys.load(AuthConfig())
    assert not keys.are_needed
    assert keys.caller(None) == keys.caller("Bearer x") == ANYBODY


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("acme", "line 1"),
        ("\nacme=short", "line 2"),
        ("a b=sk-0123456789", "line 1"),
        ("acme=sk-0123 456789", "line 1"),
        ("acme=sk-0123456789é", "line 1"),
        ("acme=sk-0123456789\nbeta=sk-0123456789", "line 2 .* another tenant"),
        ("# none\n", "there is none"),
    ],
)
def test_keys_that_cannot_be_read_are_named_by_line_and_never_shown(tmp_path, text, reason):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(StartupError, match=reason) as caught:
        Keys.load(AuthConfig(keys_file=str(path)))
    assert "0123" not in str(caught.value)
    with pytest.raises(StartupError, match="cannot be read"):
        Keys.load(AuthConfig(keys_file=str(tmp_path / "nowhere")))
    with pytest.raises(StartupError, match="KEYS is not set"):
        Keys.load(AuthConfig(keys_env="KEYS"), {})


# ---- how they are compared


@pytest.mark.parametrize(
    "header",
    [None, "", KEY, "Bearer", "Bearer ", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \ud800"],
)
def test_what_is_no_key(header):
    with pytest.raises(Unauthenticated):
        KEYS.caller(header)


def test_keys_are_compared_in_constant_time(monkeypatch):
    """S-06: digests, by hmac.compare_digest, all of them whichever it is."""
    compared, really = [], hmac.compare_digest

    def compare(a, b):
        compared.append((a, b))
        return really(a, b)

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    for key in (KEY, OTHER, "sk-nobody"):
        compared.clear()
        with contextlib.suppress(Unauthenticated):
            KEYS.caller(f"Bearer {key}")
        assert len(compared) == 2
        assert {len(a) for pair in compared for a in pair} == {32}


# ---- every door


async def test_every_route_and_method_needs_a_key_but_health(doors, service):
    """S-05: routes there are, routes there are not, and every method; health is open."""
    routes = {route.path for route in build_api(service).routes}
    assert {"/v1/completions", "/v1/models", "/metrics", "/openapi.json", "/v1/cluster"} <= routes
    api_routes = {r.path for r in build_api(service).routes if isinstance(r, APIRoute)}
    assert api_routes > OPEN_PATHS
    others = {"/", "/nowhere", "/v1", "/health", "/health/live/", "/health/../v1/models"}
    for path in sorted(routes | others):
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "ODD"):
            response = await doors.http.request(method, path)
            if path in OPEN_PATHS:
                assert response.status_code in (200, 405), (method, path)
                continue
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert response.json()["error"]["code"] == "unauthenticated"
    for headers in ({"authorization": "Bearer sk-nobody"}, {"authorization": KEY}):
        assert (await doors.http.get("/v1/models", headers=headers)).status_code == 401
    twice = [("authorization", "Bearer x"), ("authorization", f"Bearer {KEY}")]
    assert (await doors.http.get("/v1/models", headers=twice)).status_code == 401
    assert (await doors.http.get("/v1/models", headers=BEARER)).status_code == 200
    assert (await doors.http.get("/openapi.json", headers=BEARER)).status_code == 200


async def test_every_method_of_grpc_needs_a_key_but_health(doors):
    """S-05: what reflection names, what it does not, and reflection itself."""
    service = descriptor_pool.Default().FindServiceByName("pdserve.v1.Inference")
    names = [f"/{service.full_name}/{method.name}" for method in service.methods]
    assert len(names) == 8
    for name in [*names, "/pdserve.v1.Inference/Nothing", "/nobody.Service/Nothing", "/x"]:
        for metadata in ((), (("authorization", "Bearer sk-nobody"),)):
            call = doors.channel.unary_stream(name)(b"", metadata=metadata, timeout=5)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
            assert dict(caught.value.trailing_metadata())["pdserve-code"] == "unauthenticated"
    reflection = reflection_pb2_grpc.ServerReflectionStub(doors.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reflection.ServerReflectionInfo(timeout=5).read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    call = reflection.ServerReflectionInfo(metadata=METADATA, timeout=5)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    assert (await call.read()).list_services_response.service
    call.cancel()
    health = health_pb2_grpc.HealthStub(doors.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_who_has_a_key_is_served_and_their_tenant_travels(doors, service, cluster):
    """The tenant is the key's, whatever the client says."""
    tenants = []
    submit = service.dispatcher.submit

    def spy(accepted):
        tenants.append(accepted.request.tenant)
        return submit(accepted)

    service.dispatcher.submit = spy
    body = {"prompt": "hi", "user": "beta", "tenant": "beta"}
    for key in (KEY, OTHER):
        headers = {"authorization": f"Bearer {key}"}
        response = await doors.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200
    request = pb.GenerateRequest(prompt="hi", user="beta")
    async for _ in doors.stub.Generate(request, metadata=METADATA):
        pass
    assert tenants == ["acme", "beta", "acme"]
    assert_conserved(service)


async def test_a_key_brings_its_tier_and_its_ceiling_to_every_door(cluster):
    """What the file says of a key holds over HTTP and gRPC, whatever tier the client names."""
    service = make_router(cluster, door=Door(keys=Keys({KEY: "acme:low:normal"}), tiers=TIERS))
    async with open_doors(service) as doors:
        for named in ({}, {"priority": "normal"}):
            body = {"prompt": "hi"} | named
            answer = await doors.http.post("/v1/completions", json=body, headers=BEARER)
            assert answer.status_code == 200
            async for _ in doors.stub.Generate(pb.GenerateRequest(**body), metadata=METADATA):
                pass
        for named in ("high", "gold"):
            body = {"prompt": "hi", "priority": named}
            answer = await doors.http.post("/v1/completions", json=body, headers=BEARER)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await doors.stub.Generate(pb.GenerateRequest(**body), metadata=METADATA).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "priority" in caught.value.details()
    assert [want.priority for want in cluster.route.wants] == ["low", "low", "normal", "normal"]


async def test_keys_are_in_no_log_and_no_answer(doors, caplog):
    """S-06: neither good ones nor bad ones."""
    caplog.set_level(logging.DEBUG)
    for key in (KEY, "sk-wrong-0123456789"):
        headers = {"authorization": f"Bearer {key}"}
        response = await doors.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert key not in response.text
        assert key not in str(response.headers)
    metrics = await doors.http.get("/metrics", headers=BEARER)
    for secret in (KEY, "sk-wrong-0123456789"):
        assert secret not in metrics.text
        # httpx and asyncio log what the test itself sends; ours is what counts.
        ours = [r.getMessage() for r in caplog.records if r.name.startswith(("router", "cluster"))]
        assert not any(secret in line for line in ours)


async def test_a_key_has_so_many_open_calls_and_no_more(cluster):
    """S-10, S-14: each key by itself; what has ended makes room."""
    cluster.script = None
    limits = LimitsConfig(max_streams_per_key=2)
    service = make_router(cluster, limits=limits, door=Door(keys=KEYS))
    acme, beta = KEYS.caller(f"Bearer {KEY}"), KEYS.caller(f"Bearer {OTHER}")
    calls = []
    for _ in range(2):
        with service.admission(acme):
            calls.append(await service.generate(GenerateInput(prompt="hello"), acme))
    with pytest.raises(QueueFull), service.admission(acme):
        raise AssertionError("let in")
    with service.admission(beta):
        calls.append(await service.generate(GenerateInput(prompt="hello"), beta))
    with service.admission(ANYBODY):
        pass
    calls[0].cancel()
    await until(lambda: service.dispatcher.num_open == 2)
    with service.admission(acme):
        pass
    for call in calls:
        call.cancel()
    await until(lambda: metric(service, "pdserve_requests_in_flight") == 0)
    assert_conserved(service)
    await service.stop()


def test_callers_differ_by_key_and_share_a_tenant():
    keys = Keys({"sk-0123456789": "acme", "sk-9876543210": "acme"})
    first, second = (keys.caller(f"Bearer {key}") for key in ("sk-0123456789", "sk-9876543210"))
    assert first.tenant == second.tenant == "acme"
    assert first.key != second.key
    assert isinstance(first, Caller)
