"""Python files that run exported plans: what registers and selects MSCCL++ plans, and what measures plans.

Input: nothing. Output: texts of files, which ``bundle`` and ``crossreduce export`` write beside the plans. They need no
crossreduce where they run. ``assets/`` has their sources, which name the functions of other packages that they call.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import Final

REGISTER: Final = "register_mscclpp.py"
MEASURE: Final = "measure.py"

LAUNCH: Final = {
    "mscclpp": """One host of 8 GPUs, with the NCCL calls of an unchanged program (`backend="nccl"`). PATH is the
folder of MSCCL++'s libraries, and NCCL that of the original library, for calls without a plan:

    MSCCLPP_NCCL_LIB_PATH=NCCL/libnccl.so LD_PRELOAD=PATH/libmscclpp_nccl.so \\
      torchrun --nnodes=1 --nproc_per_node=8 measure.py --json results.json

Two hosts, the same line on both, with N = 0 and N = 1; HOST is the first one's address:

    MSCCLPP_NCCL_LIB_PATH=NCCL/libnccl.so LD_PRELOAD=PATH/libmscclpp_nccl.so \\
      torchrun --nnodes=2 --node_rank=N --nproc_per_node=8 --master_addr=HOST --master_port=29500 \\
      measure.py --json results.json

In a program: `import register_mscclpp; register_mscclpp.register()` before `init_process_group`. With a communicator of
your own: `algorithms = register_mscclpp.algorithms(rank)`, then `register_mscclpp.select(algorithms, nbytes)`.
""",
    "msccl": """`measure.py` uses torch.distributed, so that one host of 8 GPUs is measured by

    MSCCL_ALGO_DIR=DIR/msccl RCCL_MSCCL_FORCE_ENABLE=1 \\
      torchrun --nnodes=1 --nproc_per_node=8 measure.py --json results.json

and two hosts by the same line on both, with `--nnodes=2 --node_rank=N --master_addr=HOST --master_port=29500`.
""",
}
"""By format, how to launch the files, as Markdown."""


@lru_cache(maxsize=2)
def _asset(name: str) -> str:
    """Return the text of a file of assets/."""
    return files(__package__).joinpath("assets", f"{name}.txt").read_text("utf-8")


def runner_files(format_name: str, about: str = "ranks.json", prefix: str = "") -> dict[str, str]:
    """Return the texts of the files that run plans of a format, by name; nothing for other formats.

    They read the file ``about``, which lists the plans, in their own folder. ``prefix`` begins their names.

    >>> list(runner_files("mscclpp")), list(runner_files("msccl")), runner_files("chakra")
    (['register_mscclpp.py', 'measure.py'], ['measure.py'], {})
    """
    names = {"mscclpp": (REGISTER, MEASURE), "msccl": (MEASURE,)}.get(format_name, ())
    replaced = {
        'ABOUT = "ranks.json"': f"ABOUT = {about!r}",
        f'REGISTER = "{REGISTER}"': f"REGISTER = {prefix + REGISTER!r}",
    }
    texts = {}
    for name in names:
        text = _asset(name)
        for before, after in replaced.items() if prefix else ():
            text = text.replace(before, after)
        texts[prefix + name] = text
    return texts
