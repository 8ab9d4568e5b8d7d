"""Reports in the format that src/util.cu of nccl-tests writes, and times of collectives in closed form."""

import json


def report(program, rows, *, processes=1, gpus=8, hosts=1, name=""):
    """Return the bytes of a report with ``rows`` of (bytes, microseconds).

    One device per process is listed, as nccl-tests does. Processes are spread evenly over the hosts.
    """
    devices = [
        {
            "rank": process * gpus,
            "group": 0,
            "pid": 4000 + process,
            "hostname": f"node{process * hosts // processes}",
            "device": process % (processes // hosts) * gpus,
            "device_info": "NVIDIA H100 80GB HBM3",
        }
        for process in range(processes)
    ]
    config = {"nthreads": 1, "ngpus": gpus, "minimum_bytes": rows[0][0], "iterations": 20, "devices": devices}
    results = [
        {
            "size": size,
            "count": size // 4,
            "type": "float",
            "redop": "sum",
            "root": "     0" if "broadcast" in program else "    -1",
            "out_of_place": {"time": micros, "alg_bw": size / micros / 1e3, "bus_bw": 1.0, "nwrong": 0.0},
            "in_place": {"time": micros * 3, "alg_bw": size / micros / 3e3, "bus_bw": 1.0, "nwrong": None},
            "experiment_name": name,
        }
        for size, micros in rows
    ]
    content = {
        "version": 2,
        "args": [program, "-b", "1K", "-e", "1G", "-f", "4", "-J", "results.json"],
        "nccl_version": 22907,
        "config": config,
        "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"},
        "errors": [],
    }
    return json.dumps(content).encode()


# The hops of a ring of n devices, by collective. In each hop, a device sends 1/n of the buffer.
HOPS = {"all_reduce": lambda n: 2 * (n - 1), "all_gather": lambda n: n - 1, "reduce_scatter": lambda n: n - 1}


def star_seconds(collective, n, nbytes, gb_per_s, latency_s):
    """Return the time of a ring through a switch. Each hop has two links, and its bytes pass both at the same time."""
    return HOPS[collective](n) * (2 * latency_s + nbytes / n / (gb_per_s * 1e9))


def pair_seconds(collective, nbytes, gb_per_s, latency_s):
    """Return the time of two devices that exchange halves of the buffer, over one link in each direction."""
    return HOPS[collective](2) * (latency_s + nbytes / 2 / (gb_per_s * 1e9))
