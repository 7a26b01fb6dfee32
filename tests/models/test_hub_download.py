"""What is downloaded of a hub id, by the real client from a server on this machine that speaks the hub's HTTP."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from common.models import loading
from tests.conftest import EMBEDDED, ROOT

import pytest

COMMIT = "0" * 40
# what a process of its own does, as the client reads HF_ENDPOINT when it is imported
LOAD = """
import sys
from common.cpu import repair_torchvision
repair_torchvision()
import torch
from common.models import find_family, load_model
for _ in range(2):  # the second finds all in the cache
    model = load_model(find_family("an/id", 32, 96, 1), "an/id", torch.float32, "cpu")
print(sum(p.double().sum().item() for p in model.transformer.parameters()))
"""


@pytest.fixture
def hub(tmp_path):
    """(folder of a repository's files, address of its server, names of the files that were fetched so far)."""
    repository = Path(shutil.copytree(EMBEDDED, tmp_path / "repository"))
    fetched = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, content, **headers):
            self.send_response(200)
            for name, value in ({"Content-Length": len(content)} | headers).items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            files = sorted(str(file.relative_to(repository)) for file in repository.rglob("*") if file.is_file())
            if path.startswith("/api/models/an/id/tree/"):
                sizes = {name: (repository / name).stat().st_size for name in files}
                entries = [{"type": "file", "path": name, "size": sizes[name], "oid": name} for name in files]
                self.reply(json.dumps(entries).encode())
            elif path.startswith("/api/models/an/id"):
                info = {"id": "an/id", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                self.reply(json.dumps(info).encode())
            elif (name := path.removeprefix("/an/id/resolve/").partition("/")[2]) in files:
                if self.command == "GET":
                    fetched.append(name)
                self.reply((repository / name).read_bytes(), X_Repo_Commit=COMMIT, ETag=f'"{name}"')
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield repository, f"http://127.0.0.1:{server.server_port}", fetched
    server.shutdown()
    server.server_close()


def as_variant(repository, component, keep=False):
    (file,) = (repository / component).glob("*.safetensors")
    shutil.copy(file, file.with_name(f"{file.stem}.fp16.safetensors"))
    if not keep:
        file.unlink()


@pytest.mark.parametrize("having", [(), ("transformer", "vae", "text_encoder")])
def test_nothing_is_downloaded_twice(hub, tmp_path, having):
    """A component that the hub has as a variant alone gets that one; where it has both, the plain file alone comes."""
    repository, address, fetched = hub
    weights = {file.parent.name: file.name for file in repository.glob("*/*.safetensors")}
    for component in weights:
        as_variant(repository, component, keep=component not in having)
    (repository / "all_in_one.safetensors").write_bytes(b"a single file, which is not loaded")
    environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "NO_PROXY": "*", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert sorted(name for name in fetched if name.endswith(".safetensors")) == sorted(
        f"{component}/{Path(name).stem}.fp16.safetensors" if component in having else f"{component}/{name}"
        for component, name in weights.items()
    )
    for component in weights:
        assert bool(re.search(f": {component} .* fp16", done.stderr)) == (component in having)


# ---- without a network -----------------------------------------------------------------------------------------------
def address_of(monkeypatch, url):
    """Let the hub's files be at `url`. Returns the list of what its client is asked for."""
    asked = []
    monkeypatch.setattr(loading, "hf_hub_url", lambda model, name: f"{url}/{model}/{name}")
    monkeypatch.setattr(loading, "hf_hub_download", lambda *given: asked.append(given) or "model_index.json")
    return asked


@pytest.fixture
def port():
    """A port of this machine, and its socket, which does not listen yet."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1], taken


def unresolved(*given, **named):
    raise socket.gaierror(-3, "Temporary failure in name resolution")


@pytest.mark.fast
def test_a_refused_connection_ends_in_a_line_and_is_not_tried_again(monkeypatch, port):
    asked = address_of(monkeypatch, f"http://127.0.0.1:{port[0]}")
    with pytest.raises(ValueError) as error:
        loading.download_index("models/typo")
    assert re.fullmatch(r"--model models/typo: .* 127\.0\.0\.1 \(Connection refused\)", str(error.value))
    assert asked == []


@pytest.mark.fast
def test_a_name_without_an_address_ends_in_a_line_and_is_not_tried_again(monkeypatch):
    asked = address_of(monkeypatch, "http://hub.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ValueError, match=r" hub.invalid \(Temporary failure in name resolution\)$"):
        loading.download_index("models/typo")
    assert asked == []


@pytest.mark.fast
def test_a_slow_or_broken_network_is_left_to_the_hubs_client(monkeypatch, port):
    """Nothing answers; or the answer is no HTTP."""
    asked = address_of(monkeypatch, f"http://127.0.0.1:{port[0]}")
    monkeypatch.setattr(loading, "PROBE_S", 0.1)
    port[1].listen()
    assert str(loading.download_index("an/id")) == "model_index.json"

    def answer():
        for _ in range(2):  # the first is the probe above
            connection = port[1].accept()[0]
            connection.sendall(b"no HTTP\r\n\r\n")
            connection.close()

    threading.Thread(target=answer, daemon=True).start()
    loading.download_index("an/id")
    assert asked == [("an/id", "model_index.json")] * 2


@pytest.mark.fast
def test_what_is_in_the_cache_is_not_asked_for_first(monkeypatch, port, tmp_path):
    asked = address_of(monkeypatch, f"http://127.0.0.1:{port[0]}")
    monkeypatch.setattr(loading, "known_folder", lambda model: tmp_path)
    loading.download_index("an/id")
    assert asked == [("an/id", "model_index.json")]
