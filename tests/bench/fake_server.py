"""Stands in for llama-server: answers /health, /completion (events) and /slots, or misbehaves as told.

    python fake_server.py MODE --host H --port P [anything]

MODE: `good`, `dies` (prints and exits 3), `slow` (never healthy), `refuses` (/completion answers 500),
`breaks` (its stream ends in the middle).
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODE = sys.argv[1]
if MODE == "dies":
    print("loading\nerror: this model is no model", flush=True)
    sys.exit(3)


class Handler(BaseHTTPRequestHandler):
    """One request per connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._json(503 if MODE == "slow" else 200, {"status": "ok"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/slots"):
            self._json(400 if "missing" in body["filename"] else 200, {"asked": [self.path, body]})
        elif MODE == "refuses":
            self._json(500, {"error": "no room for it"})
        else:
            self._stream(body)

    def _stream(self, body):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(body["n_predict"]):
            self._event({"content": f"é{i}", "stop": False})
            if MODE == "breaks":
                self.wfile.flush()
                self.connection.close()
                return
        timings = {"prompt_n": len(body["prompt"]) - 1, "predicted_n": body["n_predict"]}
        self._event({"content": "", "stop": True, "timings": timings, "asked": body})
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, data):
        text = f"data: {json.dumps(data)}\n\n".encode()
        half = len(text) // 2  # an event may come in pieces
        for part in (text[:half], text[half:]):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()
            time.sleep(0.002)

    def _json(self, status, data):
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


host, port = (sys.argv[sys.argv.index(name) + 1] for name in ("--host", "--port"))
ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
