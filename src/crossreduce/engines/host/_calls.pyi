from collections.abc import Callable
from typing import Any

class Calls:
    def reduce(self, op: Any, value: Any, destinations: Any, options: Any, out: Any, /) -> Any: ...
    def batch_reduce(self, op: Any, pairs: Any, options: Any, out: Any, /) -> list[Any] | None: ...
    def all_reduce(
        self, op: Any, lists: list[list[Any]], devices: tuple[str, ...] | None, options: Any, outs: Any, /
    ) -> list[list[Any]] | None: ...
    def add(
        self,
        op: Any,
        options: Any,
        sources: tuple[str, ...],
        destinations: tuple[str, ...],
        is_default: bool,
        rows: Any,
        results: Any,
        with_out: bool,
        runs: Any,
        /,
    ) -> None: ...

def use(
    per_replica: type,
    mirrored: type,
    reduce_op: type,
    ops_by_name: dict[str, Any],
    device_names: Callable[[str], tuple[str, ...]],
    default_options: Any,
    large_array_offset: int,
    /,
) -> None: ...
def use_device_type(number: int, /) -> None: ...
def use_torch_devices(
    is_filled: Callable[[], bool],
    block: Callable[[Any, int], Any],
    reinterpret: Callable[[Any, Any, Any, int], Any],
    scratch: Callable[[int, int], tuple[Any, int]],
    alignment: int,
    /,
) -> None: ...
def use_torch(
    tensor_type: type,
    exchange_api: Any,
    is_transformed: Callable[[], bool],
    mark_dirty: Callable[[Any], Any],
    empty_like: Callable[[Any], Any],
    int8: Any,
    uint8: Any,
    /,
) -> None: ...
def use_torch_layout(plain: list[tuple[Any, ...]], special: list[Any], /) -> bool: ...
