"""A local stand-in for the hub's HTTP interface: as much of it as pushing a model and loading it again takes."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

USER = "someone"


class Hub(ThreadingHTTPServer):
    """Repositories, in memory: the files of each, by path, after every commit."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, list[str]] = {}  # messages
        self.lfs: dict[str, bytes] = {}
        self.broken = False  # answers 500 to every commit

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def sha(self, repo: str) -> str:
        return hashlib.sha1(f"{repo} {len(self.commits[repo])}".encode()).hexdigest()


@contextmanager
def running_hub():
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self):
        self.route("GET")

    def do_HEAD(self):
        self.route("HEAD")

    def do_POST(self):
        self.route("POST")

    def do_PUT(self):
        self.route("PUT")

    def log_message(self, *args):
        pass

    def route(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if method == "POST" and self.headers.get("Authorization") != "Bearer token-of-someone":
            return self.reply({"error": "Invalid username or password."}, 401)
        path = self.path.partition("?")[0]
        for pattern, methods, action in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method in methods:
                return action(self, body, *match.groups())
        self.reply({"error": f"{method} {path} is not part of the stand-in"}, 404)

    def reply(self, content, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # Each of these answers one kind of request

    def whoami(self, body):
        self.reply({"type": "user", "name": USER, "fullname": USER, "orgs": [], "auth": {"type": "access_token"}})

    def validate_yaml(self, body):
        front_matter = yaml.safe_load(json.loads(body)["content"].split("---")[1])
        errors = [] if isinstance(front_matter, dict) else [{"message": "not a mapping"}]
        self.reply({"errors": errors, "warnings": []}, 200 if not errors else 400)

    def create(self, body):
        request = json.loads(body)
        repo = f"{request.get('organization') or USER}/{request['name']}"
        status = 409 if repo in self.server.repos else 200
        self.server.repos.setdefault(repo, {})
        self.server.commits.setdefault(repo, [])
        self.reply({"url": f"{self.server.endpoint}/{repo}", "name": repo, "id": repo}, status)

    def info(self, body, repo):
        if repo not in self.server.repos:
            return self.reply({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        siblings = [{"rfilename": path} for path in self.server.repos[repo]]
        self.reply({"id": repo, "sha": self.server.sha(repo), "private": False, "tags": [], "siblings": siblings})

    def tree(self, body, repo):
        files = self.server.repos[repo]
        self.reply([{"type": "file", "path": path, "size": len(data), "oid": "0" * 40} for path, data in files.items()])

    def preupload(self, body, repo):
        self.reply(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".bin")) else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(body)["files"]
                ]
            }
        )

    def lfs_batch(self, body, repo):
        objects = [
            {**entry, "actions": {"upload": {"href": f"{self.server.endpoint}/lfs/{entry['oid']}"}}}
            for entry in json.loads(body)["objects"]
        ]
        self.reply({"transfer": "basic", "objects": objects})

    def lfs_upload(self, body, oid):
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.lfs[oid] = body
        self.reply(b"")

    def commit(self, body, repo):
        if self.server.broken:
            return self.reply({"error": "Internal error"}, 500)
        files = self.server.repos[repo]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.server.commits[repo].append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.lfs[value["oid"]]
            else:
                raise NotImplementedError(entry["key"])
        sha = self.server.sha(repo)
        url = f"{self.server.endpoint}/{repo}/commit/{sha}"
        self.reply({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": "", "pullRequestUrl": None})

    def resolve(self, body, repo, path):
        files = self.server.repos.get(repo, {})
        if path not in files:
            code = "EntryNotFound" if repo in self.server.repos else "RepoNotFound"
            return self.reply({"error": "Not found"}, 404, {"X-Error-Code": code, **self._commit_header(repo)})
        etag = hashlib.sha256(files[path]).hexdigest()
        self.reply(files[path], 200, {"ETag": f'"{etag}"', **self._commit_header(repo)})

    def _commit_header(self, repo):
        return {"X-Repo-Commit": self.server.sha(repo)} if repo in self.server.repos else {}


REPO = r"([^/]+/[^/]+)"
ROUTES = [
    (r"/api/whoami-v2", ["GET"], Handler.whoami),
    (r"/api/validate-yaml", ["POST"], Handler.validate_yaml),
    (r"/api/repos/create", ["POST"], Handler.create),
    (rf"/api/models/{REPO}(?:/revision/[^/]+)?", ["GET"], Handler.info),
    (rf"/api/models/{REPO}/tree/[^/]+", ["GET"], Handler.tree),
    (rf"/api/models/{REPO}/preupload/[^/]+", ["POST"], Handler.preupload),
    (rf"/api/models/{REPO}/commit/[^/]+", ["POST"], Handler.commit),
    (rf"/{REPO}\.git/info/lfs/objects/batch", ["POST"], Handler.lfs_batch),
    (r"/lfs/([0-9a-f]+)", ["PUT"], Handler.lfs_upload),
    (rf"/{REPO}/resolve/[^/]+/(.+)", ["GET", "HEAD"], Handler.resolve),
]
