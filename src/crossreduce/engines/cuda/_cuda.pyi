from collections.abc import Callable, Sequence
from typing import Any, TypedDict

class Description(TypedDict):
    name: str
    capability: int
    multiprocessors: int
    driver: int

class Launch(TypedDict):
    """A launch of a kernel with one table (``Launching`` in ``native/plan.hpp``).

    ``unit_nbytes`` has the bytes of a unit of each source and result, for one order after another. An order has four
    masks, a part its size, its order and its places.
    """

    device: int
    kernel: str
    large: bool
    sources: int
    results: int
    stack: int
    divisor: float
    kind: int
    values: int
    units: int
    unit_nbytes: Sequence[int]
    orders: Sequence[tuple[int, int, int, int]]
    parts: Sequence[tuple[int, int, Sequence[tuple[int, int]]]]

class Plan:
    def __new__(
        cls,
        *,
        devices: Sequence[int],
        streams: Sequence[tuple[int, int]],
        scratch: Sequence[int],
        operations: Sequence[Any],
        begins: Sequence[int],
        ends: Sequence[int],
        resumes: Sequence[int],
        reads_peers: bool,
    ) -> Plan: ...
    def run(
        self,
        sources: Sequence[Sequence[int]],
        results: Sequence[Sequence[int]],
        scratch: Sequence[Sequence[int]],
        streams: Sequence[Sequence[int]],
        owners: Any,
    ) -> bool: ...
    def use_otherwise(self, plan: Plan) -> None: ...

def use(function: Callable[[str, int, int, str, str], Exception]) -> None: ...
def missing() -> str: ...
def device_count() -> int: ...
def describe(device: int) -> Description: ...
def load(device: int, code: bytes) -> None: ...
def is_loaded(device: int) -> bool: ...
def enable_peer(device: int, other: int) -> bool: ...
def reads_peer_rightly(copy: Plan, owner: int, nbytes: int) -> bool: ...
def follow(device: int, stream: int, after: int) -> None: ...
def counts() -> tuple[int, int]: ...
def xla_handler() -> Any: ...
def xla_empty_handler() -> Any: ...
def keep(number: int, plan: Plan, operands: int, results: int) -> None: ...
def use_stream(device: int, stream: int, hook: Callable[[list[tuple[int, int, int]], bool], None] | None) -> None: ...
