"""Serve a model twice, with replay on and off, verify the one against the other and bench them side by side.

Both servers run at once, so the devices are split: the visible ones are given half to each. Results go to a directory:
`verify.json`, `bench.json`, `ttft.png` and the servers' logs.

    python tools/compare_servers.py --model DIR --serve "ARGUMENTS OF vllm serve" --bench "ARGUMENTS OF bench"
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from vllm_ascend_replay.reference.server import serve

DEVICES = "ASCEND_RT_VISIBLE_DEVICES"


def halves(devices: str) -> list[dict[str, str]]:
    """Half of the visible devices for each server; nothing where none are named (a machine without NPUs)."""
    names = [name for name in devices.split(",") if name]
    if len(names) < 2:
        return [{}, {}]
    middle = len(names) // 2
    return [{DEVICES: ",".join(part)} for part in (names[:middle], names[middle:])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--serve", default="", help="arguments of vllm serve")
    parser.add_argument("--bench", default="", help="arguments of vllm-ascend-replay bench")
    parser.add_argument("--verify", default="", help="arguments of vllm-ascend-replay verify")
    parser.add_argument("--devices", default=os.environ.get(DEVICES, ""), help="devices to split, e.g. 0,1,2,3")
    parser.add_argument("--out", type=Path, default=Path("comparison"))
    options = parser.parse_args()
    if not options.model:
        parser.error("--model is empty: name a model directory (make: NPU_MODEL=DIR)")
    options.out.mkdir(parents=True, exist_ok=True)
    arguments = shlex.split(options.serve)
    settings = {"on": {}, "off": {"ASCEND_REPLAY": "0"}}
    with ExitStack() as stack, ThreadPoolExecutor() as pool:

        def start(name: str, devices: dict[str, str]) -> str:
            environ = {**os.environ, **settings[name], **devices}
            log = options.out / f"{name}.log"
            return stack.enter_context(serve(options.model, log, arguments=arguments, environ=environ))

        on, off = pool.map(start, settings, halves(options.devices))
        command = [sys.executable, "-c", "from vllm_ascend_replay.cli import main; main()"]
        verify = ["verify", "--url", on, "--baseline-url", off, "--json", str(options.out / "verify.json")]
        bench = ["bench", "--url", on, "--compare", off, "--json", str(options.out / "bench.json")]
        bench += ["--plot", str(options.out / "ttft.png")]
        return max(
            subprocess.run([*command, *verify, *shlex.split(options.verify)]).returncode,
            subprocess.run([*command, *bench, *shlex.split(options.bench)]).returncode,
        )


if __name__ == "__main__":
    sys.exit(main())
