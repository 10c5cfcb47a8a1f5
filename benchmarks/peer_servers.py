"""Other engines as HTTP servers for `many_requests.py`; runs in the engine's own environment (docs/peers.md).

    python benchmarks/peer_servers.py llamacpp MODEL.gguf --requests 32 --context 2304 --threads 2 --port 8001
    python benchmarks/peer_servers.py openvino FOLDER ...

llama.cpp has a server of its own. OpenVINO GenAI's continuous batching gets a small one here: a thread steps the
pipeline, others wait for its tokens. Prefix caches are off.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def llamacpp(args: argparse.Namespace) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.port = args.model, args.port
    params.n_parallel, params.n_ctx = args.requests, args.requests * args.context
    params.kv_unified, params.cache_prompt, params.cache_ram_mib, params.verbosity = False, False, 0, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


def openvino(args: argparse.Namespace) -> None:
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.enable_prefix_caching, scheduler.cache_size = args.requests, False, 3
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": args.threads, "PERFORMANCE_HINT": "LATENCY"}
    properties["INFERENCE_PRECISION_HINT"] = "bf16"
    pipeline = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)
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
    ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["llamacpp", "openvino"])
    parser.add_argument("model")
    for name in ("requests", "context", "threads", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    {"llamacpp": llamacpp, "openvino": openvino}[given.engine](given)
