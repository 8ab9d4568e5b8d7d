"""How much time does a trace of the collectives add per call?

The same calls run with and without a trace, in turn: all-reduces of torch.distributed, in place, of several sizes. On
one rank, the time is that of the CPU, so that other programs count less: this is the cost of the recording. On two
ranks it is the elapsed time of the slower rank, which also waits for the other one.
Run: python benchmarks/tracing.py [--turns N] [--json FILE]
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

from common import RESULTS, keep, size_text, summary

SIZES = (4, 1024, 1 << 14, 1 << 17, 1 << 20)  # bytes
TURN_S = 0.01


def rank(number, ranks, folder, turns):
    import torch
    import torch.distributed as dist

    import crossreduce.trace

    torch.set_num_threads(1)
    dist.init_process_group("crossreduce", f"file://{folder}/store", rank=number, world_size=ranks)
    times = torch.zeros(ranks, dtype=torch.float64)
    clock = time.thread_time if ranks == 1 else time.perf_counter

    def turn(traced, x, count):
        if traced:
            crossreduce.trace.start(f"{folder}/trace")
        dist.all_reduce(x)
        dist.barrier()
        start = clock()
        for _ in range(count):
            dist.all_reduce(x)
        times.zero_()[number] = (clock() - start) / count
        crossreduce.trace.stop()
        dist.all_reduce(times)
        return float(times.max())

    rows = {}
    for nbytes in SIZES:
        x = torch.zeros(nbytes // 4)
        turn(False, x, 20)
        count = max(4, int(TURN_S / turn(False, x, 20)))
        count = int(dist.all_reduce(shared := torch.tensor([count])) or shared[0] // ranks)
        found = {"off": [], "on": []}
        for k in range(turns):
            for name in ("off", "on") if k % 2 else ("on", "off"):
                found[name].append(turn(name == "on", x, count))
            for path in Path(folder, "trace").glob(f"rank{number}.*"):
                path.unlink()
        rows[nbytes] = found
    if number == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--json", type=Path, default=RESULTS / "tracing.json")
    arguments = parser.parse_args()
    context, kept = multiprocessing.get_context("spawn"), []
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            processes = [context.Process(target=rank, args=(k, ranks, folder, arguments.turns)) for k in range(ranks)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            assert all(process.exitcode == 0 for process in processes)
            rows = json.loads(Path(folder, "rows.json").read_text())
        for nbytes, times in rows.items():
            # Pairs of neighbouring turns: what else the machine does changes slowly.
            added = statistics.median(on - off for on, off in zip(times["on"], times["off"], strict=True))
            row = {"ranks": ranks, "bytes": int(nbytes), "added_s": added}
            kept.append({**row, **{name: summary(each) for name, each in times.items()}})
            medians = ", ".join(f"{name} {kept[-1][name]['median_s'] * 1e6:9.2f} us" for name in times)
            print(f"{ranks} ranks, {size_text(int(nbytes)):>8}: {medians}, added {added * 1e9:8.0f} ns")
    keep("tracing", {"question": "the time of an all-reduce with and without a trace", "rows": kept}, arguments.json)


if __name__ == "__main__":
    main()
