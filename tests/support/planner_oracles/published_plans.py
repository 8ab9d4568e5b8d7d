"""Published plans of a DGX-1, for tests and benchmarks."""

ALPHA, BRICK = 0.7e-6, 25e9  # seconds of latency of a link, and bytes per second of a brick

# (chunks per node, steps, rounds) of plans for a DGX-1. Chunks have L / chunks bytes, where L is the size of a node's
# input in bytes. A round sends one chunk over each brick. Source: Cai et al., Synthesizing Optimal Collective
# Algorithms, PPoPP 2021, table 4.
SCCL = {
    "all_gather": [(1, 2, 2), (2, 2, 3), (6, 3, 7)],
    "reduce_scatter": [(1, 2, 2), (2, 2, 3), (6, 3, 7)],
    "broadcast": [(2, 2, 2), (6, 3, 3), (12, 4, 4), (18, 5, 5)],
    "reduce": [(2, 2, 2), (6, 3, 3), (12, 4, 4), (18, 5, 5)],
    "all_reduce": [(8, 4, 4), (16, 4, 6), (48, 6, 14)],
}
