"""Seconds to hand an engine's process full weights, and to hand back a rollout: pickled, and in memory that both map.

    python benchmarks/push_weights.py 1.0 | tee docs/records/push_weights.txt       # GB of random fp32 weights

No engine and no GPU: a child process copies what it gets into parameters of its own. "pickled" is how it went before,
16 tensors a message; "shared" is VLLMEngine's way, buckets of BUCKET_BYTES in the engine's dtype, with the fingerprints
that both sides take of every tensor, and without. The ways take turns, three times; medians, and the range.
"""

import pickle
import re
import statistics
import subprocess
import sys
import time
from multiprocessing import Pipe, Process
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.engine import client, messages

import torch

ROUNDS = 3
ELEMENTS = 4_000_000  # of a weight
TENSORS_PER_MESSAGE = 16


def random_weights(gigabytes):
    """{name: fp32 tensor} of about so many GB."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, round(gigabytes * 1e9 / 4 / ELEMENTS))
    return {f"block.{i}.weight": torch.randn(ELEMENTS, generator=generator) for i in range(count)}


def take(connection, way):
    """What the other process sent."""
    if way.endswith("pickled"):
        return pickle.loads(connection.recv_bytes())
    return messages.receive(connection)


def engine(connection, names, dtype):
    """The other process: copies weights into its own, and sends what it is asked for."""
    torch.set_num_threads(1)
    own = {name: torch.zeros(ELEMENTS, dtype=dtype) for name in names}
    while True:
        way = pickle.loads(connection.recv_bytes())
        if way == "end":
            return
        if way.startswith("answer"):
            rollout = {"latents": own[names[0]].float().expand(25, -1).clone()}  # .4 GB
            connection.send_bytes(b"ready")
            if way == "answer pickled":
                connection.send_bytes(pickle.dumps(rollout, protocol=pickle.HIGHEST_PROTOCOL))
            else:
                messages.send(connection, rollout)
            continue
        part = take(connection, way)
        held = {}
        for name, tensor in part.items():
            own[name].copy_(tensor)
            if way == "shared, fingerprints":
                held[name] = messages.fingerprint(own[name])
        connection.send_bytes(pickle.dumps(held))


def push(connection, way, weights, dtype):
    """Seconds until the other process has all weights."""
    start = time.perf_counter()
    if way == "pickled":
        items = list(weights.items())
        for i in range(0, len(items), TENSORS_PER_MESSAGE):
            connection.send_bytes(pickle.dumps(way))
            part = dict(items[i : i + TENSORS_PER_MESSAGE])
            connection.send_bytes(pickle.dumps(part, protocol=pickle.HIGHEST_PROTOCOL))
            connection.recv_bytes()
        return time.perf_counter() - start
    buckets = client.VLLMEngine.__new__(client.VLLMEngine)
    buckets.dtype = dtype
    for names, num_bytes in buckets._buckets(weights):
        connection.send_bytes(pickle.dumps(way))
        memory = messages.Memory(num_bytes)
        bucket = {name: memory.put(weights[name], dtype) for name in names}
        messages.send(connection, bucket, memory)
        memory.close()
        pushed = {}
        if way == "shared, fingerprints":
            pushed = {name: messages.fingerprint(tensor) for name, tensor in bucket.items()}
        assert pickle.loads(connection.recv_bytes()) == pushed
    return time.perf_counter() - start


def fetch(connection, way):
    """Seconds until a rollout of the other process is here."""
    connection.send_bytes(pickle.dumps(way))
    connection.recv_bytes()
    start = time.perf_counter()
    rollout = take(connection, way)
    rollout["latents"].sum()  # it is read, too
    return time.perf_counter() - start


def main(gigabytes):
    torch.set_num_threads(1)
    weights = random_weights(gigabytes)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    size = sum(tensor.nbytes for tensor in weights.values()) / 1e9
    cpu = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text()).group(1)
    print(f"# benchmarks/push_weights.py {gigabytes:g}, commit {commit}, {cpu}, one thread a process")
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = Pipe()
        other = Process(target=engine, args=(theirs, list(weights), dtype), daemon=True)
        other.start()
        seconds = {}
        for _ in range(ROUNDS):
            for way in ("pickled", "shared", "shared, fingerprints"):
                seconds.setdefault(way, []).append(push(ours, way, weights, dtype))
            if dtype == torch.float32:
                for way in ("answer pickled", "answer shared"):
                    seconds.setdefault(way, []).append(fetch(ours, way))
        ours.send_bytes(pickle.dumps("end"))
        other.join()
        for way, times in seconds.items():
            what = f"{size:.2f} GB of fp32 weights, engine {dtype}"
            if way.startswith("answer"):
                what = "a rollout of .40 GB"
            low, high = min(times), max(times)
            print(f"{way}, {what}: {statistics.median(times):.2f} s [{low:.2f}, {high:.2f}]", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
