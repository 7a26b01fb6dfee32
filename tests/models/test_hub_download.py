"""What is downloaded of a hub id, by the real client from a server on this machine that speaks the hub's HTTP."""

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

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


@pytest.mark.parametrize("having", [(), ("transformer",), ("transformer", "vae", "text_encoder")])
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
        assert (f"{component} has no plain weights: loading its variant fp16" in done.stderr) == (component in having)
