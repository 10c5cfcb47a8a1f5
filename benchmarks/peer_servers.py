"""Other engines as HTTP servers for `many_requests.py`; runs in the engine's own environment (docs/peers.md).

    python benchmarks/peer_servers.py src/sakiyomi/evaluation/bench/engines/llamacpp.py '{"model": ...}' --port 8001

The engine is opened as in row `peers`; the task is that of ``EngineProcess``. llama.cpp has a server of its own.
OpenVINO GenAI's continuous batching gets a small one here: a thread steps the pipeline, others wait for its tokens.
"""

from __future__ import annotations

import argparse
import json
import runpy
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def serve(pipeline: Any, port: int) -> None:
    """Serve OpenVINO's pipeline."""
    import openvino_genai as genai

    lock, wake, numbers = threading.Lock(), threading.Event(), iter(range(1 << 30))

    def steps() -> None:
        while True:
            with lock:
                busy = pipeline.has_non_finished_requests()
                if busy:
                    pipeline.step()
            if not busy:
                wake.wait(0.05)
                wake.clear()
            else:
                time.sleep(0)  # others may add a request

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            config = genai.GenerationConfig(max_new_tokens=asked["max_tokens"], do_sample=False, ignore_eos=True)
            with lock:
                handle = pipeline.add_request(next(numbers), asked["prompt"], config)
            wake.set()
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            left = asked["max_tokens"]
            while left > 0:
                if not handle.can_read():
                    if handle.get_status() != genai.GenerationStatus.RUNNING and not handle.can_read():
                        break
                    time.sleep(0.001)
                    continue
                count = sum(len(output.generated_ids) for output in handle.read().values())
                left -= count
                event = json.dumps({"choices": [{"text": "", "tokens": count}]})
                self.wfile.write(f"data: {event}\n\n".encode())
                self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            pass

    threading.Thread(target=steps, daemon=True).start()
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", help="file of the engine")
    parser.add_argument("task", type=json.loads, help="what it opens, JSON")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    engine = runpy.run_path(args.engine)
    if "served" in engine:
        server = engine["served"](args.task | {"port": args.port})  # as long as it is held
        print(server.listening_address, flush=True)
        threading.Event().wait()
    else:
        serve(engine["opened"](args.task), args.port)


if __name__ == "__main__":
    main()
