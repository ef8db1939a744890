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

REPOSITORY, DATASET, COMMIT = "user/tiny-bert", "user/words", "a" * 40
SMALL = ["--layers", "last2", "--rank", "4", "--features", "8", "--window", "4", "--refine-steps", "2"]


@pytest.fixture
def hub(saved_bert, tmp_path, passages):
    """A read-only hub with one model and one dataset; its address."""
    words = tmp_path / "words"
    words.mkdir()
    (words / "train.csv").write_text("label,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(passages)))
    folders = {f"/{REPOSITORY}": saved_bert, f"/datasets/{DATASET}": words}
    listings = {f"/api/models/{REPOSITORY}": saved_bert, f"/api/datasets/{DATASET}": words}

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
            for prefix, folder in folders.items():
                if path.startswith(f"{prefix}/resolve/"):
                    file = folder / path.split("/resolve/")[1].split("/", 1)[1]
                    if not file.is_file():
                        return self.answer(404, X_Error_Code="EntryNotFound")
                    content = file.read_bytes()
                    return self.answer(200, content, ETag=f'"{hashlib.sha256(content).hexdigest()}"')
            for prefix, folder in listings.items():
                if path.startswith(prefix):
                    files = [
                        {
                            "type": "file",
                            "path": file.name,
                            "rfilename": file.name,
                            "size": file.stat().st_size,
                            "oid": COMMIT,
                        }
                        for file in folder.iterdir()
                    ]
                    about = {
                        "id": prefix.split("/", 3)[3],
                        "sha": COMMIT,
                        "siblings": files,
                        "tags": [],
                        "private": False,
                    }
                    return self.answer(200, json.dumps(files if "/tree/" in path else about).encode())
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


def test_a_hub_dataset_calibrates(hub, tmp_path, saved_bert):
    child, work = command(tmp_path, hub, saved_bert, *SMALL, "--calibration", DATASET, "--samples", "20")
    assert child.returncode == 0, child.stderr
    report = json.loads((work / "tiny-bert-primal" / "conversion_report.json").read_text())
    assert report["calibration"]["source"] == DATASET and report["calibration"]["passages"] == 20


def test_a_dataset_that_the_hub_does_not_have_is_one_line(hub, tmp_path, saved_bert):
    child, work = command(tmp_path, hub, saved_bert, "--layers", "last2", "--calibration", "user/nothing")
    assert child.returncode == 2 and not list(work.iterdir())
    assert "--calibration 'user/nothing' is not a dataset that the hub gives" in child.stderr
    assert len(child.stderr.strip().splitlines()) == 1


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
