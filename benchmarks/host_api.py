"""How long do the algorithms take on host memory, compared with the frameworks' reductions and a plain loop?

8 devices, steady state. TensorFlow's ops run eagerly on 8 logical CPUs, JAX's psum under jit and shard_map on 8 CPU
devices. Run: python benchmarks/host_api.py
"""

from common import in_turn, keep
from contenders import HCA, JAX, LOOP, R2O, Batch, N, jax_peer, loop, ours, tensorflow_peers

ALGORITHMS = ("one_device", "hierarchical_copy", "ring", "halving_doubling", "direct", "auto")
CASES = {  # name: tensors, elements of each, repeats, calls per measurement
    "1 KiB": (1, 256, 30, 20),
    "160 x 1 KiB": (160, 256, 15, 1),
    "64 MiB": (1, 1 << 24, 7, 1),
}


def main():
    kept = {}
    for case, (tensors, size, repeats, inner) in CASES.items():
        batch = Batch.random([(size,)] * tensors)
        contenders = {f"ours {algorithm}": ours(batch, algorithm) for algorithm in ALGORITHMS}
        contenders["plain " + LOOP] = loop(batch)
        contenders |= tensorflow_peers(batch, HCA, R2O)
        contenders |= {JAX.replace("jit ", ""): peer for peer in jax_peer(batch).values()}
        rows = in_turn({name: one.run for name, one in contenders.items()}, repeats, inner)
        kept[case] = rows
        base = rows["ours auto"]["median_s"]
        print(f"\n{case} float32 over {N} devices: median ms, and the ratio to ours auto")
        for name, row in rows.items():
            print(f"  {name:36} {row['median_s'] * 1e3:9.3f}  x{row['median_s'] / base:.2f}")
    keep("host_api", {"devices": N, "dtype": "float32", "cases": kept})


if __name__ == "__main__":
    main()
