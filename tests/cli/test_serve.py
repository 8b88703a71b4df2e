"""`clairvit serve` from the shell: it says where it is, asks for its token, and refuses what cannot be done."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from clairvit.cli import main
from clairvit.cli.serve import address_of


def test_without_its_extra_it_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "clairvit.web.server", raising=False)
    assert main(["serve"]) == 2
    assert "needs the package uvicorn, which cannot be imported" in (message := capsys.readouterr().err)
    assert 'type: pip install "clairvit[web]", or in' in message


def test_a_port_that_is_taken_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"port {port} (Address already in use); --port 0 takes any" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["203.0.113.7", "no such machine"])
def test_a_host_that_is_not_this_machine_is_an_error(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", host, "--port", "0"]) == 2
    assert "--host 127.0.0.1 is this machine" in capsys.readouterr().err


def test_the_address_can_be_opened() -> None:
    assert address_of("127.0.0.1", 80, None) == "http://127.0.0.1:80/"
    assert address_of("::1", 80, "secret") == "http://[::1]:80/#token=secret"
    assert address_of("0.0.0.0", 80, None) == f"http://{socket.gethostname()}:80/"


def test_a_short_token_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--token", "abc"]) == 2
    assert "16 or more" in capsys.readouterr().err


def test_labels_are_of_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "-m", "pets", "-m", "timm:vit_tiny_patch16_224", "--labels", "a,b"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "one by one" in text
    assert "-m mymodels:first -m mymodels:second" in text


HANGING = """
import json, sys, urllib.request
head = {"Authorization": f"Bearer {sys.argv[2]}"}
with urllib.request.urlopen(urllib.request.Request(sys.argv[1], b"method=rise&stream=true", head)) as reply:
    for line in map(json.loads, reply):
        if line.get("progress", {}).get("done") == 1 or line.get("progress", {}).get("task") == "working":
            print("begun", flush=True)
            break
    print(json.loads([*reply][-1])["problem"]["message"])
"""


def test_it_serves_until_it_is_stopped_in_the_middle_of_work() -> None:
    code = "import sys; from clairvit.cli import main; sys.exit(main(['serve', '--port', '0', '--token', 'auto']))"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    ) as server:
        try:
            assert server.stdout is not None
            match = re.search(r"Open (http://127\.0\.0\.1:\d+/)#token=(\S+)", server.stdout.readline())
            assert match is not None
            address, token = match.groups()
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{address}api/models", timeout=120)
            http_request = urllib.request.Request(f"{address}api/models", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(http_request, timeout=120) as reply:
                assert b"pets" in reply.read()
            zero = urllib.request.Request(f"{address}api/explain", b"method=vanilla", dict(http_request.header_items()))
            with urllib.request.urlopen(zero, timeout=120) as reply:
                assert b"zero everywhere" in reply.read()  # in the reply, and not on the terminal
            slow = subprocess.Popen(
                [sys.executable, "-c", HANGING, f"{address}api/explain", token], stdout=subprocess.PIPE, text=True
            )
            assert slow.stdout is not None
            assert slow.stdout.readline() == "begun\n"
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(120) == 130
        assert slow.communicate(timeout=120)[0] == "The server is stopping.\n"
        assert server.stderr is not None
        assert server.stderr.read() == "clairvit: stopped; what was written until now is complete.\n"
