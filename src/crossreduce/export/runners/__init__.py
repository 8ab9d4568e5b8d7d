"""Python files that run exported plans: what registers and selects MSCCL++ plans, and what measures plans.

Input: nothing. Output: texts of files, which ``bundle`` and ``crossreduce export`` write beside the plans. They need no
crossreduce where they run. ``assets/`` has their sources, which name the functions of other packages that they call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Final

REGISTER: Final = "register_mscclpp.py"
MEASURE: Final = "measure.py"

_LAUNCH: Final = {
    "mscclpp": """With the NCCL calls of an unchanged program (`backend="nccl"`). PATH is the folder of MSCCL++'s
libraries, and NCCL that of the original library, for calls without a plan. {where}

    MSCCLPP_NCCL_LIB_PATH=NCCL/libnccl.so LD_PRELOAD=PATH/libmscclpp_nccl.so \\
      {command}

In a program: `import register_mscclpp; register_mscclpp.register()` before `init_process_group`. With a communicator of
your own: `algorithms = register_mscclpp.algorithms(rank)`, then `register_mscclpp.select(algorithms, nbytes)`.
""",
    "msccl": """`measure.py` uses torch.distributed. {where}

    MSCCL_ALGO_DIR=DIR/msccl RCCL_MSCCL_FORCE_ENABLE=1 \\
      {command}
""",
}


def launch_text(format_name: str, ranks: Sequence[str]) -> str:
    """Return how to launch the files of a format on the devices ``ranks``, as Markdown.

    >>> print(launch_text("msccl", ["cuda:0", "cuda:2"]).splitlines()[3].strip())
    CUDA_VISIBLE_DEVICES=0,2 torchrun --nproc_per_node=2 measure.py --json results.json
    """
    devices: dict[str, list[str]] = {}  # by host
    for device in ranks:
        host, _, name = device.rpartition("/")
        devices.setdefault(host, []).append(name.removeprefix("cuda:"))
    lists, counts = {",".join(own) for own in devices.values()}, {str(len(own)) for own in devices.values()}
    is_default = lists == {",".join(map(str, range(len(own)))) for own in devices.values()} or ":" in str(lists)
    gpus, count = lists.pop() if len(lists) == 1 else "G", counts.pop() if len(counts) == 1 else "P"
    command = "torchrun" if is_default else f"CUDA_VISIBLE_DEVICES={gpus} torchrun"
    letters = "HOST is the address of the first one" + (", P the number of its ranks" if count == "P" else "")
    letters += ", G the numbers of its GPUs" if "=G " in command else ""
    where = "On the host:"
    if len(devices) > 1:
        where = f"On each host, with N = 0 to {len(devices) - 1}; {letters}:"
        command += f" --nnodes={len(devices)} --node_rank=N --master_addr=HOST --master_port=29500"
    return _LAUNCH[format_name].format(
        where=where, command=f"{command} --nproc_per_node={count} measure.py --json results.json"
    )


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
