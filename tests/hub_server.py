"""A hub on 127.0.0.1 for tests: repositories with branches, owners and tokens, in memory; nothing leaves the machine."""

import base64
import hashlib
import json
import os
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN, READER, FORGED = "hf_user_0123456789abcdef", "hf_reader_0123456789abcdef", "hf_forged_0123456789abcdef"
ACCOUNTS = {  # token: user, role of the token, organisations; in "observed" the user may not write
    TOKEN: ("user", "write", ["team", "observed"]),
    READER: ("user", "read", []),
}


@dataclass
class Repository:
    """Files by commit, commits by branch."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch, files):
        sha = hashlib.sha1(f"{branch} {len(self.commits)}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha


class RefusalError(Exception):
    """An answer that is an error; `more` goes into its body."""

    def __init__(self, status, message, code=None, **more):
        super().__init__(message)
        self.status, self.message, self.code, self.more = status, message, code, more


class Hub:
    """The hub's memory, and what it answers; `requests` holds method and path of each request that wrote."""

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.broken: dict[str, int] = {}  # part of a path: status it is answered with
        self.url = ""

    def add(self, name, folder=None):
        """A repository with the files of a folder; its name is user/name or datasets/user/name."""
        repository = self.repositories[name] = Repository()
        paths = [path for path in folder.rglob("*") if path.is_file()] if folder else []
        repository.commit("main", {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths})

    def files(self, name, branch="main"):
        repository = self.repositories[name]
        return repository.commits[repository.branches[branch]]

    def see(self, name, token):
        """A repository that the token may see."""
        repository = self.repositories.get(name)
        if repository is None or (repository.private and token is None):
            raise RefusalError(404 if token else 401, "Repository not found", "RepoNotFound")
        return repository

    def own(self, name, token):
        """Check that the token may write to a name."""
        if token is None:
            raise RefusalError(401, "Invalid username or password.")
        user, role, teams = ACCOUNTS[token]
        owner = name.split("/")[0]
        if role != "write" or owner not in (user, *teams) or owner == "observed":
            raise RefusalError(403, f"You don't have the rights to write to the namespace {owner}")

    def whoami(self, token, body):
        if token is None:
            raise RefusalError(401, "Invalid username or password.")
        user, role, teams = ACCOUNTS[token]
        orgs = [{"name": team} for team in teams]
        return {"type": "user", "name": user, "orgs": orgs, "auth": {"accessToken": {"role": role}}}

    def create(self, token, body):
        asked = json.loads(body)
        name = f"{asked.get('organization') or ACCOUNTS.get(token, ('nobody',))[0]}/{asked['name']}"
        self.own(name, token)
        if name in self.repositories:
            raise RefusalError(409, "You already created this model repo", url=f"{self.url}/{name}")
        self.add(name)
        self.repositories[name].private = asked.get("visibility") == "private" or bool(asked.get("private"))
        return {"url": f"{self.url}/{name}", "id": name, "name": name}

    def validate(self, token, body):
        errors = [] if json.loads(body)["content"].startswith("---\n") else [{"message": "no front matter"}]
        if errors:
            raise RefusalError(400, json.dumps(errors))
        return {"errors": [], "warnings": []}

    def branch(self, token, body, name, branch):
        self.own(name, token)
        repository = self.see(name, token)
        if branch in repository.branches:
            raise RefusalError(409, "Reference already exists")
        repository.branches[branch] = repository.branches["main"]
        return {}

    def preupload(self, token, body, name, revision):
        self.own(name, token)
        modes = {True: "lfs", False: "regular"}
        files = [
            {"path": path, "uploadMode": modes[path.endswith((".safetensors", ".png"))], "shouldIgnore": False}
            for path in (file["path"] for file in json.loads(body)["files"])
        ]
        return {"files": files}

    def batch(self, token, body, name):
        self.own(name, token)
        objects = [
            {**thing, "actions": {"upload": {"href": f"{self.url}/objects/{thing['oid']}"}}}
            for thing in json.loads(body)["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def store(self, token, body, digest):
        if hashlib.sha256(body).hexdigest() != digest:
            raise RefusalError(400, "the content is not what was announced")
        self.objects[digest] = body
        return {}

    def commit(self, token, body, name, revision):
        self.own(name, token)
        repository = self.see(name, token)
        if revision not in repository.branches:
            raise RefusalError(404, "Revision not found", "RevisionNotFound")
        files = dict(repository.commits[repository.branches[revision]])
        for line in body.splitlines():
            kind, value = (entry := json.loads(line))["key"], entry["value"]
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif kind == "deletedFile":
                del files[value["path"]]
        repository.commit(revision, files)
        sha = repository.branches[revision]
        return {"commitUrl": f"{self.url}/{name}/commit/{sha}", "commitOid": sha, "success": True}

    def about(self, token, body, kind, name, revision="main"):
        repository, sha = self.find(token, kind, name, revision)
        siblings = [{"rfilename": path} for path in repository.commits[sha]]
        return {"id": name, "sha": sha, "siblings": siblings, "tags": [], "private": repository.private}

    def tree(self, token, body, kind, name, revision, folder=""):
        repository, sha = self.find(token, kind, name, revision)
        files = [
            {"type": "file", "path": path, "size": len(content), "oid": sha}
            for path, content in repository.commits[sha].items()
            if path.startswith(folder)
        ]
        if not files and folder:
            raise RefusalError(404, "Entry not found", "EntryNotFound")
        return files

    def resolve(self, token, kind, name, revision, path):
        """A file's content and commit."""
        repository, sha = self.find(token, kind, name, revision)
        if path not in repository.commits[sha]:
            raise RefusalError(404, "Entry not found", "EntryNotFound")
        return repository.commits[sha][path], sha

    def find(self, token, kind, name, revision):
        """A repository that the token may see, and the commit of a branch or a commit."""
        repository = self.see(name if kind == "models" else f"{kind}/{name}", token)
        sha = repository.branches.get(revision, revision)
        if sha not in repository.commits:
            raise RefusalError(404, "Revision not found", "RevisionNotFound")
        return repository, sha


NAME, PART = r"([^/]+/[^/]+)", r"([^/]+)"
ROUTES = {
    ("GET", r"/api/whoami-v2"): Hub.whoami,
    ("POST", r"/api/repos/create"): Hub.create,
    ("POST", r"/api/validate-yaml"): Hub.validate,
    ("POST", rf"/api/models/{NAME}/branch/{PART}"): Hub.branch,
    ("POST", rf"/api/models/{NAME}/preupload/{PART}"): Hub.preupload,
    ("POST", rf"/api/models/{NAME}/commit/{PART}"): Hub.commit,
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch"): Hub.batch,
    ("PUT", rf"/objects/{PART}"): Hub.store,
    ("GET", rf"/api/(models|datasets)/{NAME}"): Hub.about,
    ("GET", rf"/api/(models|datasets)/{NAME}/revision/{PART}"): Hub.about,
    ("GET", rf"/api/(models|datasets)/{NAME}/tree/{PART}(?:/(.+))?"): Hub.tree,
}
FILE = re.compile(rf"/(?:(datasets)/)?{NAME}/resolve/{PART}/(.+)")


class Handler(BaseHTTPRequestHandler):
    """HTTP to and from a `Hub`, which is the class attribute."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments):
        pass

    def body(self):
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def answer(self, status, content, **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle_request(self):
        body, path = self.body(), urlsplit(self.path).path
        method = "GET" if self.command == "HEAD" else self.command
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        if method != "GET":
            self.hub.requests.append((method, path))
        try:
            self.serve(method, path, token, body)
        except RefusalError as refusal:
            headers = {"X_Error_Message": refusal.message, "X_Error_Code": refusal.code}
            content = json.dumps({"error": refusal.message, **refusal.more}).encode()
            self.answer(refusal.status, content, **{name: value for name, value in headers.items() if value})

    def serve(self, method, path, token, body):
        for part, status in self.hub.broken.items():
            if part in path:
                raise RefusalError(status, f"no luck, {token}")
        if token is not None and token not in ACCOUNTS:
            raise RefusalError(401, "Invalid credentials in Authorization header")
        if path == "/":
            return self.answer(200, b"{}")
        if method == "GET" and (match := FILE.fullmatch(path)):
            kind, *where = match.groups("models")
            content, sha = self.hub.resolve(token, kind, *map(unquote, where))
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            return self.answer(200, content, ETag=etag, X_Repo_Commit=sha)
        for (wanted, pattern), action in ROUTES.items():
            if wanted == method and (match := re.fullmatch(pattern, path)):
                result = action(self.hub, token, body, *map(unquote, match.groups("")))
                return self.answer(200, json.dumps(result).encode(), Content_Type="application/json")
        raise RefusalError(404, "Not found", "RepoNotFound")

    def do_GET(self):
        self.handle_request()

    def do_HEAD(self):
        self.handle_request()

    def do_POST(self):
        self.handle_request()

    def do_PUT(self):
        self.handle_request()


@contextmanager
def serving():
    """A `Hub` that is listening."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(home, endpoint, token=None):
    """The environment of a process whose hub is `endpoint`, with its own cache and nobody's login."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
    }
    ours = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    return {**inherited, **ours, **({"HF_TOKEN": token} if token else {})}
