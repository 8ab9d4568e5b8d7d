"""vLLM's communicator for tensors on CPUs, with a process group of crossreduce.

Input: calls of vLLM's groups (``GroupCoordinator``). Output: collectives and messages in a group of crossreduce, which
the ranks make together. The rest is inherited from vLLM's own class, whose shared memory is not used.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from ..errors import MismatchError, UnsupportedError, shown
from ..torch import NAME, Group

# vLLM makes two groups of torch of the same ranks just before a communicator, so its ranks come at about the same time.
_WAIT_S: Final = 20.0
_GROUPS: Final[WeakValueDictionary[str, Group]] = WeakValueDictionary()


def _all_reduce(tensor: Any, name: str) -> None:
    _GROUPS[name].all_reduce(tensor)


# Compiled models call an op. That of functional collectives would copy the tensor, and wait for the group's thread.
_LIBRARY: Final = torch.library.Library("crossreduce", "FRAGMENT")
_LIBRARY.define("vllm_all_reduce_(Tensor(a!) tensor, str name) -> ()")
_LIBRARY.impl("vllm_all_reduce_", _all_reduce, "CompositeExplicitAutograd")
_LIBRARY.impl("vllm_all_reduce_", lambda *_: None, "Meta")


class CrossreduceCommunicator(CpuCommunicator):  # type: ignore[misc]
    """The communicator of a group of vLLM. Its ``device_group`` is a process group of crossreduce.

    Args:
      cpu_group: vLLM's group of torch, whose ranks make the new group.
      device: the device of the tensors.
      device_group: is replaced.
      unique_name: the name of vLLM's group, such as "tp:0".
      more: arguments that other versions of vLLM pass.
    Raises:
      MismatchError: some of the ranks do not use crossreduce.
    """

    def __init__(
        self, cpu_group: Any, device: Any = None, device_group: Any = None, unique_name: str = "", **more: Any
    ) -> None:
        ranks = dist.get_process_group_ranks(cpu_group)
        _require_all(ranks, unique_name)
        device_group = dist.new_group(ranks, backend=NAME, use_local_synchronization=True)
        # vLLM makes shared memory of its own for groups whose names begin with tp or pp.
        super().__init__(cpu_group, device, device_group, f"crossreduce {unique_name}", **more)
        self.unique_name, self.supports_tensor_dict = unique_name, True
        self.name_of_group: str = device_group.group_name
        _GROUPS[self.name_of_group] = device_group

    def all_reduce(self, input_: Any) -> Any:
        """Sum a tensor over the ranks, in place, and return it."""
        if torch.compiler.is_compiling():
            torch.ops.crossreduce.vllm_all_reduce_(input_, self.name_of_group)
        else:
            _all_reduce(input_, self.name_of_group)
        return input_

    def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int) -> None:
        """Send tensors, with their names, dtypes and shapes, to a rank of the group."""
        for name, value in tensor_dict.items():
            if not isinstance(value, torch.Tensor):
                problem = "vLLM's dictionaries of tensors can only have tensors."
                raise UnsupportedError.of(problem, f"{name!r}: {shown(value)}", "send_object of vLLM's group")
        header = [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in tensor_dict.items()]
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        works = [self.device_group.send([x], dst) for x in (torch.tensor([len(text)]), text, *tensor_dict.values())]
        for work in works:
            work.wait()

    def recv_tensor_dict(self, src: int) -> dict[str, Any]:
        """Receive what ``send_tensor_dict`` sends."""
        (size,) = self._received(src, [1], torch.int64)
        text = bytes(self._received(src, [int(size)], torch.uint8).tolist())
        return {name: self._received(src, shape, getattr(torch, dtype)) for name, dtype, shape in json.loads(text)}

    def _received(self, src: int, shape: list[int], dtype: Any) -> Any:
        tensor = torch.empty(shape, dtype=dtype)
        self.device_group.recv([tensor], src).wait()
        return tensor

    def destroy(self) -> None:
        """Leave the group."""
        super().destroy()
        if _GROUPS.pop(self.name_of_group, None) is not None:
            dist.destroy_process_group(self.device_group)


def _require_all(ranks: list[int], name: str) -> None:
    """Raise an error unless all ranks make this communicator, since the two parts would wait for each other."""
    store = dist.PrefixStore(f"{NAME}/vllm/{name}/{ranks}", dist.distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), "")
    try:
        store.wait([str(rank) for rank in ranks], timedelta(seconds=_WAIT_S))
    except RuntimeError:
        others = [rank for rank in ranks if not store.check([str(rank)])]
        problem = f"not all ranks of vLLM's group {name} use crossreduce."
        given = f"rank {dist.get_rank()} does; {', '.join(map(str, others))} did not say so within {_WAIT_S:.0f} s"
        raise MismatchError.of(problem, given, "CROSSREDUCE_VLLM=1 on all hosts, or on none") from None
