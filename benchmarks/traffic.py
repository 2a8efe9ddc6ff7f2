"""Benchmark of traffic: bytes per optimizer step between two processes, gradient accumulation 8 and 1. See README.md.

python benchmarks/traffic.py [--steps N]   (Linux: reads the counters of lo; root gets a network namespace of its own)
"""

import argparse
import ctypes
import fcntl
import json
import os
import socket
import struct
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import loop
from benchmarks.forked_ranks import in_ranks

BAR = 1.15
GLOBAL = 16  # examples per step: 2 ranks × 1 micro-batch of 8, or 2 ranks × 8 micro-batches of 1


def private_network() -> bool:
    """Move this process and its children to a new network namespace; return True if that was allowed."""
    if ctypes.CDLL(None).unshare(0x40000000):  # CLONE_NEWNET
        return False
    with socket.socket() as s:  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING
        fcntl.ioctl(s, 0x8914, struct.pack("16sh22x", b"lo", 0x41))
    return True


def sent() -> int:
    """Return the bytes that the loopback interface (lo) has sent so far."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def bytes_of(folder: Path, micro: int, steps: int) -> int:
    """Return the bytes that a run of `steps` steps sends."""
    before = sent()
    words = loop.flags(
        folder, f"run{micro}_{steps}", global_batch_size=GLOBAL, per_device_batch_size=micro, max_steps=steps
    )
    in_ranks(2, 1, loop.train.main, words)
    return sent() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps of the short run; the long run has twice as many")
    steps = parser.parse_args().steps
    alone = private_network()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["HF_DATASETS_CACHE"] = f"{temporary}/datasets"
        loop.make_files(Path(temporary), loop.SMALL, 48)
        each = {}
        for accumulation in (1, 8):  # the difference of a long and a short run excludes start and end
            short, long = (bytes_of(Path(temporary), GLOBAL // 2 // accumulation, n) for n in (steps, 2 * steps))
            each[accumulation] = (long - short) / steps
    result = {f"bytes_per_step_accumulation_{n}": round(value) for n, value in each.items()}
    result |= {"ratio": round(each[8] / each[1], 4), "bar": BAR, "loopback_of_its_own": alone}
    print(json.dumps(result, indent=1))
    loop.save({"traffic": result}, 1)
    sys.exit(result["ratio"] >= BAR)


if __name__ == "__main__":
    main()
