"""The launcher around a host that does nothing: what is stopped, what is kept, what is said."""

import contextlib
import dataclasses
import os
import signal
import threading

import pytest

from cluster import config as deploy_config
from cluster.config import AuthConfig
from cluster.errors import StartupError
from deploy import calls, commands, host_inline, host_ray, launch, proof
from deploy.host_inline import InlineHost
from deploy.host_ray import RayHost
from deploy.model_source import ResolvedModel
from deploy.run_state import RunState
from deploy.stop_signals import StopSignals

PAIR = [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"}]
TREE = {"pools": PAIR, "model": {"path": "trial", "name": "m"}, "endpoints": {"control_port": 8123}}


@pytest.fixture
def config():
    return deploy_config.from_tree(TREE)


@pytest.fixture
def signals():
    """Signals as they were, whatever the test leaves."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield StopSignals()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


class FakeHost:
    """Starts nothing; ``on_start`` is what happens meanwhile."""

    def __init__(self, on_start=lambda: None, failures=()):
        self.on_start = on_start
        self.failures = list(failures)
        self.is_stopped = False

    def start(self):
        self.on_start()

    def settle(self):
        pass

    def failure(self):
        return self.failures.pop(0) if self.failures else None

    def start_failure(self):
        return None

    def where_logs(self):
        return "logs: here"

    def stop(self, timeout_s):
        self.is_stopped = True


@pytest.fixture
def run(config, signals, tmp_path, monkeypatch):
    """Serve with a fake host; returns the state, so that a test sees what is left."""
    state = RunState(config.endpoints.control_port, root=tmp_path)
    for name in ("PDSERVE_RUN_ID", "SPT_NOENV"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(launch, "RunState", lambda port: state)
    monkeypatch.setattr(launch, "check_machine", lambda config, state: None)
    monkeypatch.setattr(launch, "check_memory", lambda config, folder: None)
    monkeypatch.setattr(launch, "resolve_model", lambda path, name: ResolvedModel(tmp_path, name))
    monkeypatch.setattr(launch, "_completed", lambda config, folder, name: config)
    monkeypatch.setattr(launch, "missing", lambda config: "")
    monkeypatch.setattr(proof, "prove", lambda config: "text")

    def serve(host, *, config=config, **options):
        monkeypatch.setattr(launch, "_host", lambda config, folder, state: host)
        return launch.serve(config, is_once=True, **options)

    serve.state = state
    return serve


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def fail():
    raise StartupError("no")


def test_a_proved_cluster_is_stopped_and_leaves_no_folder(run):
    host = FakeHost()
    assert run(host) == 0
    assert (host.is_stopped, run.state.folder.exists()) == (True, False)


def test_ctrl_c_in_a_phase_stops_and_leaves_no_folder(run):
    host = FakeHost(on_start=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(host)
    assert (host.is_stopped, run.state.folder.exists()) == (True, False)


def test_a_second_ctrl_c_does_not_cut_the_stop_short(run):
    host = FakeHost(on_start=interrupt)
    stop = host.stop

    def stop_under_fire(timeout_s):
        interrupt()
        stop(timeout_s)

    host.stop = stop_under_fire
    with pytest.raises(KeyboardInterrupt):
        run(host)
    assert host.is_stopped


def test_a_signal_that_a_library_swallows_is_raised_again(run):
    def swallow():
        with contextlib.suppress(KeyboardInterrupt):
            interrupt()
        threading.Event().wait(60)

    with pytest.raises(KeyboardInterrupt):
        run(FakeHost(on_start=swallow))


def test_a_held_signal_is_raised_at_the_end(signals):
    done = []

    def import_something():
        with signals.held():
            interrupt()
            done.append("whole")

    signals.arm()
    with pytest.raises(KeyboardInterrupt):
        import_something()
    signals.disarm()
    assert done == ["whole"]


@pytest.mark.parametrize("phase", ["start", "failure", "proof"])
def test_a_failed_start_keeps_its_logs_and_says_where(phase, run, monkeypatch):
    host = FakeHost(on_start=fail if phase == "start" else lambda: None)
    if phase == "failure":
        host.failures = [StartupError("no")]
        monkeypatch.setattr(launch, "missing", lambda config: "a worker")
    if phase == "proof":
        monkeypatch.setattr(proof, "prove", lambda config: fail())
    with pytest.raises(StartupError, match=r"^no \(logs: here\)$"):
        run(host)
    assert (host.is_stopped, run.state.logs_dir.exists()) == (True, True)


def test_logs_of_a_bug_are_kept_too(run, monkeypatch):
    monkeypatch.setattr(proof, "prove", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(FakeHost())
    assert run.state.logs_dir.exists()


def test_a_log_that_is_named_is_not_named_again(run):
    def fail_with_log():
        raise StartupError(f"no (log: {run.state.logs_dir}/decode.log)")

    with pytest.raises(StartupError, match=r"^no \(log: \S+decode\.log\)$"):
        run(FakeHost(on_start=fail_with_log))


def test_what_never_gets_ready_ends_with_what_is_missing(run, monkeypatch):
    monkeypatch.setattr(launch, "_READY_TIMEOUT_S", 0.0)
    monkeypatch.setattr(launch, "missing", lambda config: "pool decode: 0 of 1 workers")
    with pytest.raises(StartupError, match=r"pool decode: 0 of 1 .*start again.*logs: here"):
        run(FakeHost())


def test_a_key_of_an_unknown_tier_ends_the_start_before_anything_runs(run, config, tmp_path):
    """Not a router on Ray a minute later."""
    path = tmp_path / "keys"
    path.write_text("acme:gold=sk-acme-0123456789\n")
    host = FakeHost()
    keyed = dataclasses.replace(config, auth=AuthConfig(keys_file=str(path)))
    with pytest.raises(StartupError, match=r"acme: 'gold' is none of scheduling\.tiers"):
        run(host, config=keyed)
    assert not host.is_stopped, "it was started"
    assert not run.state.folder.exists()


def test_what_does_not_move_ends_before_that(run, monkeypatch):
    monkeypatch.setattr("deploy.start_watch.STUCK_S", 0.0)
    monkeypatch.setattr(launch, "missing", lambda config: "pool decode: 0 of 1 workers")
    with pytest.raises(StartupError, match=r"nothing has moved.*pool decode: 0 of 1 .*logs: here"):
        run(FakeHost())


def test_calls_repeat_the_options_of_this_run(config):
    text = calls.calls_text(config, ["--config", "/a b/c.yaml", "--set", "model.name=m"])
    same = "--config '/a b/c.yaml' --set model.name=m"
    assert commands.pdserve("status", "--config", "/a b/c.yaml", "--set", "model.name=m") in text
    assert f"generate {same}" in text
    assert "timeout_s" in text
    assert "import openai" not in text


def test_down_names_another_control_port_only():
    assert commands.down(8002).endswith("pdserve down")
    assert commands.down(8003).endswith("pdserve down --set endpoints.control_port=8003")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("\x1b[36mray::x\x1b[39m\nTraceback\ncluster.errors.UnsupportedModel: a: b\n", "a: b"),
        ("Traceback\nValueError: inner\n\nDuring handling\nRuntimeError: outer", "RuntimeError: o"),
        ("The actor died: ActorDiedError()", "its process was killed"),
        ("", "no reason given"),
    ],
)
def test_the_last_error_of_a_serve_message(message, expected):
    assert host_ray._last_error(message).startswith(expected)


def test_a_failed_deployment_writes_its_log(config, tmp_path):
    state = RunState(8123, root=tmp_path)
    state.logs_dir.mkdir(parents=True)
    error = RayHost(config, model_path=tmp_path, state=state)._failed("decode", "ValueError: x")
    log = state.logs_dir / "decode-failed.log"
    assert error.message == f"decode failed to start: ValueError: x (log: {log})"
    assert "ValueError: x" in log.read_text()


def test_a_silent_serve_is_given_up(config, tmp_path, monkeypatch):
    """Its own status call may never return: the launcher's does."""
    never = threading.Event()
    monkeypatch.setattr(host_ray, "_ask_status", lambda found: never.wait())
    monkeypatch.setattr(host_ray, "_STATUS_TIMEOUT_S", 0.0)
    host = RayHost(config, model_path=tmp_path, state=RunState(8123, root=tmp_path))
    host._answered = host._clock.now()
    assert host.failure() is None
    monkeypatch.setattr(host_ray, "_SILENT_S", -1.0)
    assert "has not answered" in host.failure().message
    never.set()


def test_one_process_names_why_it_ended(config, tmp_path, monkeypatch):
    """There is no model in the folder: the reason is in the error."""
    monkeypatch.setattr(
        host_inline.ControlServer, "start", lambda *_: (_ for _ in ()).throw(OSError("port gone"))
    )
    host = InlineHost(config, model_path=tmp_path)
    with pytest.raises(StartupError, match="port gone"):
        host.start()
    host.stop(1.0)


def test_one_process_does_not_wait_for_ever(config, tmp_path, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(host_inline, "_START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(InlineHost, "_run", lambda self: release.wait())
    host = InlineHost(config, model_path=tmp_path)
    with pytest.raises(StartupError, match="not loaded after 0 s: start again"):
        host.start()
    release.set()


def test_calls_take_their_key_from_the_environment_where_one_is_needed(config):
    text = calls.calls_text(config)
    assert "PDSERVE_API_KEY" not in text
    keyed = dataclasses.replace(config, auth=AuthConfig(keys_env="KEYS"))
    text = calls.calls_text(keyed)
    assert text.count('-H "authorization: Bearer $PDSERVE_API_KEY"') == 2
