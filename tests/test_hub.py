"""Hub ids: a model served from 127.0.0.1 converts; a model that is not there is one quick line."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import pytest

REPOSITORY, COMMIT = "user/tiny-bert", "a" * 40
SMALL = ["--layers", "last2", "--rank", "4", "--features", "8", "--window", "4", "--refine-steps", "2"]


@pytest.fixture
def hub(saved_bert):
    """A read-only hub with one model; its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments):
            pass

        def answer(self, status, content=b"{}", **headers):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", COMMIT)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_GET(self):
            path = unquote(urlparse(self.path).path)
            if path.startswith(f"/{REPOSITORY}/resolve/"):
                file = saved_bert / path.split("/resolve/")[1].split("/", 1)[1]
                if not file.is_file():
                    return self.answer(404, X_Error_Code="EntryNotFound")
                content = file.read_bytes()
                return self.answer(200, content, ETag=f'"{hashlib.sha256(content).hexdigest()}"')
            if path.startswith(f"/api/models/{REPOSITORY}"):
                listing = [{"rfilename": file.name} for file in saved_bert.iterdir()]
                about = (
                    []
                    if "/tree/" in path
                    else {"id": REPOSITORY, "sha": COMMIT, "siblings": listing, "tags": [], "private": False}
                )
                return self.answer(200, json.dumps(about).encode())
            return self.answer(404, X_Error_Code="RepoNotFound")

        def do_HEAD(self):
            self.do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def command(folder, endpoint, *arguments):
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    environment |= {
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(folder / "home"),
        "NO_PROXY": "127.0.0.1",
    }
    work = folder / "work"
    work.mkdir(exist_ok=True)
    call = [sys.executable, "-m", "hf_primal.convert.cli", *map(str, arguments)]
    return subprocess.run(call, cwd=work, env=environment, capture_output=True, text=True, timeout=120), work


def test_a_hub_id_converts_and_is_named_in_the_card(hub, tmp_path, text_file):
    child, work = command(tmp_path, hub, REPOSITORY, *SMALL, "--calibration", text_file)
    assert child.returncode == 0, child.stderr
    card = (work / "tiny-bert-primal" / "README.md").read_text()
    assert f"base_model: {REPOSITORY}" in card and f"(https://huggingface.co/{REPOSITORY})" in card
    assert (work / "tiny-bert-primal" / "tokenizer.json").is_file()


def test_an_id_that_the_hub_does_not_have_is_one_line(hub, tmp_path):
    child, work = command(tmp_path, hub, "user/nothing", "--samples", "5")
    assert child.returncode == 2 and not list(work.iterdir())
    assert (
        child.stderr.strip()
        .splitlines()[-1]
        .startswith("primal-convert: cannot load 'user/nothing': there is no such folder here, and the hub gave")
    )
    assert len(child.stderr.strip().splitlines()) == 1


def test_without_a_hub_an_unknown_id_says_that_only_the_cache_was_searched(tmp_path):
    child, work = command(tmp_path, "http://127.0.0.1:9", "user/nothing", "--samples", "5")
    assert child.returncode == 2 and not list(work.iterdir())
    assert "the hub is not reachable and the local cache does not have it" in child.stderr
    assert len(child.stderr.strip().splitlines()) == 1
