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

    def log_message(self, *args):
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.command == "POST" and self.headers.get("Authorization") != "Bearer token-of-someone":
            return self.reply({"error": "Invalid username or password."}, 401)
        path = self.path.partition("?")[0]
        for pattern, methods, action in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in methods:
                return action(self, body, *match.groups())
        self.reply({"error": f"{self.command} {path} is not part of the stand-in"}, 404)

    do_HEAD = do_POST = do_GET

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
        is_valid = isinstance(yaml.safe_load(json.loads(body)["content"].split("---")[1]), dict)
        errors = [] if is_valid else [{"message": "not a mapping"}]
        self.reply({"errors": errors, "warnings": []}, 200 if is_valid else 400)

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
        paths = [file["path"] for file in json.loads(body)["files"]]
        self.reply({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]})

    def commit(self, body, repo):
        if self.server.broken:
            return self.reply({"error": "Internal error"}, 500)
        files = self.server.repos[repo]
        header, *entries = (json.loads(line)["value"] for line in body.splitlines())
        self.server.commits[repo].append(header["summary"])
        files |= {entry["path"]: base64.b64decode(entry["content"]) for entry in entries}
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
    (rf"/{REPO}/resolve/[^/]+/(.+)", ["GET", "HEAD"], Handler.resolve),
]
