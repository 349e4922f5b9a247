"""`vllm serve` as the README has it, and a client over HTTP: turns, restarts, and a crash."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import vllm_harness
from vllm_harness import BLOCK, smollm2, stored

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S_MAX = 240.0
STORE_S_MAX = 60.0
ROOT = Path(__file__).parents[4]
README = (ROOT / "README.md").read_text()
TEXT = (ROOT / "LICENSE").read_text()
HYBRID = "kvtier_vllm.scheduler.HybridScheduler"
pytestmark = pytest.mark.timeout(900)


def command_of_the_readme(model: str, settings: dict[str, str]) -> list[str]:
    """Return the README's command for a model, with these settings, as a CPU needs it."""
    (block,) = re.findall(r"^```\n(vllm serve .*?)^```$", README, re.DOTALL | re.MULTILINE)
    command = shlex.split(block.replace("\\\n", ""))  # as a shell joins lines
    at = command.index("--kv-transfer-config") + 1
    transfer = json.loads(command[at])
    assert transfer["kv_connector_extra_config"].keys() == settings.keys()
    command[at] = json.dumps({**transfer, "kv_connector_extra_config": settings})
    command[command.index("kvtier_vllm.scheduler.HybridAsyncScheduler")] = HYBRID
    assert command[:3] == ["vllm", "serve", "MODEL"]
    return [str(Path(sys.executable).with_name("vllm")), "serve", model, *command[3:]]


class Server:
    """A vLLM server on a free port of this machine, to the end of a ``with`` block."""

    def __init__(self, settings: dict[str, str], log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        command = [
            *command_of_the_readme(smollm2(), settings),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "smollm2"),
            *("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"),
            *("--block-size", "32", "--max-num-batched-tokens", str(BLOCK)),
            *("--max-num-seqs", "8", "--enable-prompt-tokens-details"),
        ]
        environment = {**os.environ, **vllm_harness.ENVIRONMENT, "VLLM_LOGGING_LEVEL": "INFO"}
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # a server's engine has its own process
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environment, start_new_session=True
            )

    def wait(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline:
            assert self._process.poll() is None, f"the server ended: {self.log()[-4000:]}"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").is_success:
                    return
            time.sleep(0.5)
        raise AssertionError(f"no answer within {START_S_MAX} s: {self.log()[-4000:]}")

    def log(self) -> str:
        """Return what it printed."""
        return self._log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Return its counters by name, labels left out and added up."""
        totals: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if found := re.match(r"([a-zA-Z_:0-9]+)(?:\{.*\})? ([0-9.e+-]+)$", line):
                totals[found[1]] = totals.get(found[1], 0.0) + float(found[2])
        return totals

    def stop(self, sign: int = signal.SIGTERM) -> None:
        """End the server and all its processes; with SIGKILL at once, as a crash does."""
        with contextlib.suppress(ProcessLookupError):
            if sign == signal.SIGKILL:
                os.killpg(self._process.pid, sign)
            else:
                self._process.send_signal(sign)
        self._process.wait(timeout=120)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.contextmanager
def serving(settings: dict[str, str], log: Path) -> Iterator[Server]:
    """Serve until the block ends."""
    server = Server(settings, log)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def client(server: Server) -> Any:
    """Return an OpenAI client for the server."""
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=240, max_retries=0)


def chat(server: Server, messages: list[dict[str, str]], tokens: int) -> tuple[str, Any]:
    """Ask for an answer; return it and the usage."""
    done = client(server).chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=tokens
    )
    return done.choices[0].message.content, done.usage


def wait_stored(path: Path, tokens: list[int], blocks: int) -> None:
    """Wait until the first blocks of a prompt are on the SSD."""
    deadline = time.monotonic() + STORE_S_MAX
    while stored(path, tokens)[:blocks] != list(range(blocks)):
        assert time.monotonic() < deadline, f"not stored within {STORE_S_MAX} s"
        time.sleep(0.1)


def test_a_conversation_survives_a_restart_and_a_crash(tmp_path: Path) -> None:
    """A turn after a restart finds the turn before it; so does a request cut off by kill -9."""
    path = tmp_path / "kv"
    settings = {"path": str(path), "host_bytes": "512MiB", "ssd_bytes": "2GiB"}
    question = [{"role": "user", "content": f"{TEXT[:3000]}\n\nWhat is this text about?"}]

    with serving(settings, tmp_path / "first.log") as server:
        answer, usage = chat(server, question, 64)
        assert usage.prompt_tokens > 2 * BLOCK
        before = usage.total_tokens
        tokens = prompt_tokens(server, question)
        said = f"kvtier: recomputes heads while tails load; restores and saves; {path},"
        (line,) = [line for line in server.log().splitlines() if said in line]
        assert "; direct I/O; " in line or "; buffered I/O; " in line

    # It was stopped in order: nothing is lost.
    assert stored(path, tokens) == list(range(len(tokens) // BLOCK))

    turn = [
        *question,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "Say it in one sentence."},
    ]
    with serving(settings, tmp_path / "second.log") as server:
        again, usage = chat(server, turn, 32)
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached >= before // BLOCK * BLOCK - BLOCK  # the answer's tokens may split otherwise
        numbers = {name: value for name, value in server.metrics().items() if "kvtier" in name}
        assert any(value > 0 for value in numbers.values()), numbers

        cut = [{"role": "user", "content": f"{TEXT[3000:6000]}\n\nTell it to me again."}]
        tokens = prompt_tokens(server, cut)
        stream = client(server).chat.completions.create(
            model="smollm2", messages=cut, temperature=0, max_tokens=600, stream=True
        )
        next(iter(stream))
        wait_stored(path, tokens, (len(tokens) - 1) // BLOCK)
        server.stop(signal.SIGKILL)

    with serving(settings, tmp_path / "third.log") as server:
        resent, usage = chat(server, cut, 16)
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached >= (len(tokens) - 1) // BLOCK * BLOCK - BLOCK
        assert chat(server, turn, 32)[0] == again
        assert resent == plain_answer(tokens, 16)


def prompt_tokens(server: Server, messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of a conversation, as the server makes them."""
    body = {"model": "smollm2", "messages": messages}
    tokens: list[int] = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
    return tokens


def plain_answer(tokens: list[int], length: int) -> str:
    """Return what stock vLLM answers to a prompt."""
    from transformers import AutoTokenizer

    with vllm_harness.engine(smollm2()) as plain:
        answer = plain.run(tokens, answer=length)[0].tokens
    text: str = AutoTokenizer.from_pretrained(smollm2()).decode(answer, skip_special_tokens=True)
    return text
