"""The words that lead the site's search to a page first: main entries of Sphinx's index.

Such an entry gets 100 points if it equals the query, and the title or a word of a page gets less than 30 (Sphinx's
searchtools.js). Input: the Markdown of a page. Output: the same, with the entries after the first paragraph.
"""

from __future__ import annotations

import re

KEYWORDS = {
    "contract": "mean of integers, overflow, float16, bfloat16, weighted mean, federated averaging",
    "cuda": "CUDA, GPU, GPUs",
    "explanation/compared": "gloo, NCCL, MPI, comparison, alternatives, why",
    "explanation/exactness": "deterministic, determinism, reproducible, reproducibility, bitwise, same bits",
    "explanation/faq": "FAQ, questions",
    "how-to/debug-a-hang": "timeout, hang, deadlock, stuck, doctor",
    "how-to/faster-job": "faster job, calibrate, nccl-tests, cluster",
    "how-to/keras": "Keras",
    "how-to/rdma": "RDMA, UCX, InfiniBand, RoCE, EFA",
    "how-to/several-hosts": "several hosts, multi-node, firewall, network interface",
    "how-to/troubleshooting": "troubleshooting, problems",
    "how-to/when-a-rank-dies": "kill rank, dead rank, fault tolerance, elastic, shrink",
    "jax": "JAX, psum, shard_map",
    "planning": "NVLink, topology, bound",
    "pytorch": "PyTorch, torch, FSDP",
    "reference/environment": "environment variables, environment variable, entry points, plug-ins",
    "start/index": "install, installation, getting started",
    "tensorflow": "TensorFlow MirroredStrategy, MirroredStrategy, TensorFlow",
    "tracing": "trace, Perfetto, profiler",
    "tutorials/torch-data-parallel": "DDP, DistributedDataParallel, torchrun",
    "watching": "slow rank, straggler, Prometheus, monitoring",
}
_FIRST = re.compile(r"(?s)(?:---\n.*?\n---\n)?\s*# [^\n]+\n\n.*?\n\n")  # the heading and the first paragraph


def with_entries(page: str, text: str) -> str:
    """Return a page with its entries.

    >>> with_entries("explanation/faq", "# A page\\n\\nThis page ...\\n\\n## Next\\n")
    '# A page\\n\\nThis page ...\\n\\n```{index} ! FAQ, ! questions\\n```\\n\\n## Next\\n'
    """
    if page not in KEYWORDS:
        return text
    begin = _FIRST.match(text)
    assert begin, f"{page} has no heading and first paragraph"
    entries = ", ".join(f"! {word}" for word in KEYWORDS[page].split(", "))
    return f"{text[: begin.end()]}```{{index}} {entries}\n```\n\n{text[begin.end() :]}"
