"""A proxy before a vLLM server, that lets some requests for completions fail on their way."""

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests


@contextmanager
def faulty_proxy(url: str, faults: list[str]):
    """
    Serve `url` at another address, and yield that.

    Requests for completions meet `faults`, one each, as long as there are any: "503", "drop" (the connection is closed
    without an answer), "hang" (the same, after a minute), "nonsense" (a 200 that is cut off), or "" (none).
    """
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.forward("")

        def do_POST(self):
            with lock:
                fault = faults.pop(0) if self.path == "/v1/completions" and faults else ""
            self.forward(fault)

        def forward(self, fault):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if fault == "drop":
                self.close_connection = True
                return
            if fault == "hang":
                time.sleep(60)
                self.close_connection = True
                return
            headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            answer = requests.request(self.command, url + self.path, data=body, headers=headers, timeout=60)
            status, content = (503, b"overloaded") if fault == "503" else (answer.status_code, answer.content)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if fault == "nonsense" else content)
            if fault == "nonsense":
                self.close_connection = True

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
