"""Measure whether the algorithm "direct" is ever faster than "one_device" if all devices share one memory.
``planning.choose`` assumes that it is not.

8 CPU devices, with NumPy and with JAX. Run: python benchmarks/crossover.py
"""

import jax
import numpy as np
from common import in_turn, keep

import crossreduce as cr

N = 8
jax.config.update("jax_num_cpu_devices", N)


def reduction(algorithm, value):
    op = cr.AllReduceCrossDeviceOps(algorithm)
    return lambda: jax.block_until_ready(op.reduce("sum", value, value).values)


def main():
    rng = np.random.default_rng(0)
    kept = {}
    for framework in ("numpy", "jax"):
        print(f"\n{framework}: bytes per replica, median us of one_device and direct, ratio direct / one_device")
        for exponent in range(10, 27, 2):
            arrays = [rng.standard_normal((1 << exponent) // 4, dtype=np.float32) for _ in range(N)]
            if framework == "jax":
                arrays = [jax.device_put(x, d) for x, d in zip(arrays, jax.devices("cpu"), strict=True)]
            value = cr.PerReplica(arrays)
            runs = {name: reduction(name, value) for name in ("one_device", "direct")}
            rows = in_turn(runs, 9, 20 if exponent < 20 else 1)
            one, direct = (rows[name]["median_s"] * 1e6 for name in ("one_device", "direct"))
            print(f"  {1 << exponent:>10} {one:10.0f} {direct:10.0f}  {direct / one:5.2f}")
            kept[f"{framework} {1 << exponent}"] = rows
    keep("crossover", {"devices": N, "dtype": "float32", "cases": kept})


if __name__ == "__main__":
    main()
