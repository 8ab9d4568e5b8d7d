"""``crossreduce.jax.all_reduce`` in a JAX job of two processes, which communicate through gloo on this machine."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from free_port import free_port

PROGRAM = """
import sys
import jax
number, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number, initialization_timeout=30)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import crossreduce as cr
import crossreduce.jax

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("hosts", "devices"))
assert [d.process_index for d in mesh.devices[:, 0]] == [0, 1]
axes = ("hosts", "devices")
digits = np.array([[5.0**k] * 7 for k in range(4)], "float32")
x = jax.make_array_from_callback((4, 7), NamedSharding(mesh, P(axes)), lambda index: digits[index])
line = cr.Topology.from_matrix([[int(abs(a - b) == 1) for b in range(4)] for a in range(4)])
algorithms = ("hierarchical_copy", "ring", "one_shot", "recursive_doubling")
cases = [{}, {"topology": line}, *({"algorithm": name} for name in algorithms)]

def own(x):
    reduce = crossreduce.jax.all_reduce
    found = [(reduce(x[0], axes, **how), reduce(x[0], axes, "mean", **how)) for how in cases]
    return found, reduce(x[0], "hosts", algorithm="direct")[None]

run = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=P(axes), out_specs=(P(), P("devices"))))
found, across = run(x)
for how, results in zip(cases, found, strict=True):
    for result, due in zip(results, (156, 39), strict=True):  # sum and mean of 1, 5, 25 and 125
        assert all((np.asarray(shard.data) == due).all() for shard in result.addressable_shards), how
for shard in across.addressable_shards:  # the sums of 1 + 25 and of 5 + 125
    assert (np.asarray(shard.data) == [[26], [130]][shard.index[0].start]).all(), shard
jax.distributed.shutdown()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("jax_")
def test_two_processes_reduce_over_two_levels(tmp_path):
    """Two processes with two devices each compute sums and means by psum, on a linear topology, and by algorithms."""
    port, outputs, workers = free_port(), [Path(tmp_path, f"{number}.txt") for number in range(2)], []
    for number, output in enumerate(outputs):
        with output.open("w") as file:
            command = [sys.executable, "-c", PROGRAM, str(number), str(port)]
            workers.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
    late = time.monotonic() + 60
    while None in (codes := [worker.poll() for worker in workers]) and not any(codes) and time.monotonic() < late:
        time.sleep(0.05)  # if one fails, the other ends much later
    for worker in workers:
        worker.kill()
        worker.wait()
    assert codes == [0, 0], [output.read_text() for output in outputs]
