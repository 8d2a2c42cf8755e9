"""Replaces `kvloft.vllm.check` in tests of `kvloft check`.

The fake engine reports the result that the model's name selects. It does not use vLLM.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

job = json.loads(Path(sys.argv[1]).read_text())
model, passes = job["model"], job["passes"]
GROUP = {"kind": "full", "reach": 0, "block_tokens": 16, "layers": 2, "is_draft": False}
FACTS = {
    "architecture": "Fake",
    "dtype": "float32",
    "max_model_len": 100,
    "groups": [GROUP],
    "hit_tokens": 16,
    "blocks": 50,
    "full_requests": 8.0,
    "request_bytes": 4096,
    "drafter": None,
}


def tell(**what: object) -> None:
    with open(job["events"], "a") as file:
        print(json.dumps(what), file=file)


def answer(name: str) -> dict[str, object]:
    wrong = model == "wrong" and name == "disk"
    tokens = [7, 8, 10] if wrong else [7, 8, 9]
    loaded = {"host": 16 if name == "host" else 0, "disk": 16 if name == "disk" else 0}
    rest = {
        "cached": 16,
        "drafted": 0,
        "accepted": 0,
        "errors": 0,
        "damaged": 0,
        "blocks": [sum(loaded.values()) // 16],
    }
    return {"prompt": 20, "tokens": tokens, "clear": [[-0.1, 5.0, 3]] * 3} | loaded | rest


is_alone = job["disk_path"] is None
print(f"disk_path {job['disk_path']}, extra {job['extra']}, flags {job['flags']}", flush=True)
if model == "never-starts":
    print("ValueError: no such model")
    sys.exit(1)
tell(event="started", facts=FACTS, ignored=["--port", "80"] if "--port" in job["flags"] else [])
if model == "refused" and not is_alone:
    print("Traceback\nkvloft.errors.UnsupportedError: kvloft serves no such thing; run it without")
    tell(
        event="failed",
        error="RuntimeError: Engine core initialization failed. See root cause above.",
    )
    sys.exit(0)
if model == "hangs" and not is_alone:
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path(job["flags"][0]).write_text(f"{worker.pid} {Path(sys.argv[1]).parent}")
    time.sleep(1000)
if is_alone:
    tell(event="prompts", prompts={"prompt 20": [1] * 20, "fork 20": [1] * 10 + [2] * 10})
for name in ["plain", *passes] if is_alone else passes:
    prompts = (
        ("prompt 20", "fork 20")
        if name == "plain"
        else ("fork 20",)
        if name == "fork"
        else ("prompt 20",)
    )
    tell(event="pass", name=name, answers={prompt: answer(name) for prompt in prompts})
tell(event="done")
