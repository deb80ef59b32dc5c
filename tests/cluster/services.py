"""Local servers that answer as the services' HTTP APIs do, for as long as a `with`
block lasts.
"""

import contextlib
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def serving(answer):
    """A server; `answer(method, path, query, body)` gives what it returns as JSON, or
    text.

    Yields:
        Its address, `host:port`.
    """

    class Handler(BaseHTTPRequestHandler):
        def _respond(self):
            url = urllib.parse.urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            said = answer(
                self.command,
                url.path,
                dict(urllib.parse.parse_qsl(url.query)),
                json.loads(body or "null"),
            )
            status = 404 if said is None else 200
            text = (
                said
                if isinstance(said, str)
                else json.dumps(said or {"error": {"message": "not found"}})
            )
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = _respond

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
