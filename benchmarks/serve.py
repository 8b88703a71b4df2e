"""Load on `clairvit serve`: many clients at once for a while, on the built-in model.

python benchmarks/serve.py [--clients 32] [--seconds 60] [--out serve.json]

A third of the clients change methods, a third look at attention, the rest upload photos, play curves and begin LIME and
hang up. Anything but an answer or 429 is an error; clients wait as Retry-After says. Printed: counts, the times of
accepted quick requests, and how much memory the server holds before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

QUICK = ("legrad", "rollout", "genatt", "ixg", "attnlrp", "gradcam", "decompx+skipplus")
SETTLED = 100  # MB that memory may be above the start when it is over: recent results are kept


class LoadStatistics:
    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.quick: dict[str, list[float]] = {kind: [] for kind in ("explain", "trace", "upload")}  # seconds, accepted


def photo(rng: random.Random) -> bytes:
    side = rng.choice((200, 640, 1600))
    noise = np.random.default_rng(rng.randrange(2**31)).integers(0, 256, (side // 8, side // 6, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((side * 4 // 3, side)).save(buffer, "JPEG")
    return buffer.getvalue()


async def ask(client: httpx.AsyncClient, number: int, rng: random.Random, statistics: LoadStatistics) -> float:
    """One request; how long to wait before the next."""
    kind = ("explain", "trace", "mixed")[number % 3]
    if kind == "mixed":
        kind = rng.choice(("upload", "curve", "hang up", "explain"))
    started = time.monotonic()
    if kind == "trace":
        reply = await client.get(f"/api/trace/{rng.randrange(12)}", params={"head": rng.choice(("mean", "0", "2"))})
    elif kind == "upload":
        reply = await client.post("/api/explain", files={"image": ("a.jpg", photo(rng), "image/jpeg")})
    elif kind == "curve":
        reply = await client.post(
            "/api/curve", json={"method": rng.choice(QUICK), "steps": 5, "seed": rng.randrange(2**31)}
        )
    elif kind == "hang up":
        try:
            reply = await client.post("/api/explain", data={"method": "lime"}, timeout=2.0)
        except httpx.ReadTimeout:
            statistics.statuses["hang up: gone"] += 1
            return 0.0
    else:
        # A seed of its own, so that no map comes from the server's cache.
        seed = str(rng.randrange(2**31))
        form = {"method": rng.choice(QUICK), "target": str(rng.randrange(37)), "layers": "true", "seed": seed}
        reply = await client.post("/api/explain", data=form)
    statistics.statuses[f"{kind}: {reply.status_code}"] += 1
    if reply.status_code == 200 and kind in statistics.quick:
        statistics.quick[kind].append(time.monotonic() - started)
    if reply.status_code not in (200, 429):
        statistics.errors[f"{kind}: {reply.status_code} {reply.text[:200]}"] += 1
    return float(reply.headers.get("retry-after", 0))


async def visit(address: str, number: int, until: float, statistics: LoadStatistics) -> None:
    rng = random.Random(number)
    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        while time.monotonic() < until:
            try:
                wait = await ask(client, number, rng, statistics)
            except httpx.HTTPError as error:
                statistics.errors[f"{type(error).__name__}: {error}"] += 1
                wait = 1.0
            await asyncio.sleep(min(wait, max(0.0, until - time.monotonic())))


def memory(process: int) -> float:
    """Resident megabytes."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def warm_up(address: str) -> None:
    """Each kind of work once, so that what libraries keep for good is there before memory is looked at."""
    statistics, rng = LoadStatistics(), random.Random(0)
    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        for number in (0, 1, *[2] * 12):
            await ask(client, number, rng, statistics)


def summary(seconds: list[float]) -> dict[str, float]:
    """Return how many there are, their median and their 95th percentile."""
    p50, p95 = np.percentile(seconds, [50, 95]).tolist() if seconds else (float("nan"), float("nan"))
    return {"accepted": len(seconds), "p50_s": round(p50, 3), "p95_s": round(p95, 3)}


def measure(clients: int, seconds: float) -> dict[str, object]:
    command = [sys.executable, "-c", "from clairvit.cli import main; main(['serve', '--port', '0'])"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            address = next(line for line in server.stdout if "http://" in line).split()[1].rstrip("/")
            asyncio.run(warm_up(address))
            time.sleep(2)
            before, statistics = memory(server.pid), LoadStatistics()
            until = time.monotonic() + seconds

            async def everybody() -> float:
                highest = before
                visits = [asyncio.create_task(visit(address, k, until, statistics)) for k in range(clients)]
                while not all(one.done() for one in visits):
                    highest = max(highest, memory(server.pid))
                    await asyncio.sleep(0.25)
                await asyncio.gather(*visits)
                return highest

            highest = asyncio.run(everybody())
            time.sleep(15)  # curves that were accepted end, and 3 s later the server gives free memory back
            after = memory(server.pid)
        finally:
            server.terminate()
    times = {"all": [seconds for kind in statistics.quick.values() for seconds in kind], **statistics.quick}
    return {
        "clients": clients,
        "seconds": seconds,
        "answers": dict(sorted(statistics.statuses.items())),
        "errors": dict(statistics.errors),
        "quick": {kind: summary(seconds) for kind, seconds in times.items()},
        "memory_mb": {"before": round(before), "highest": round(highest), "after": round(after)},
        "load_average": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.clients, arguments.seconds)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    held = result["memory_mb"]
    assert isinstance(held, dict)
    return int(bool(result["errors"]) or held["after"] > held["before"] + SETTLED)


if __name__ == "__main__":
    sys.exit(main())
