"""``BenchRequest``: the collective, the data and the settings of one run of ``crossreduce bench``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from . import nccl_tests


@dataclass(frozen=True)
class BenchRequest:
    """One run of ``crossreduce bench``.

    Args:
      config: the collective, the devices or ranks, the sizes and the counts.
      op: sum, product, min, max or mean; sum if the collective has no op.
      redop: nccl-tests' name of the op; none if the collective has no op.
      dtype: of the elements, as NumPy spells it.
      nccl_type: as nccl-tests spells it.
      roots: the ranks to measure as root; (-1,) for collectives without a root.
      json: the file for the report.
      args: the command line, for the report.
      average: nccl-tests' ``-a``: how the ranks' times are combined.
      backends: what the ranks measure; the first is reported, the others are compared with it.
    """

    config: nccl_tests.Config
    op: str
    redop: str
    dtype: str
    nccl_type: str
    roots: tuple[int, ...]
    json: str | None
    args: tuple[str, ...]
    average: int = 1
    backends: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the request as JSON text, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BenchRequest:
        """Return the request of ``to_json``'s text."""

        def tuples(fields: dict[str, Any]) -> dict[str, Any]:
            return {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}

        fields = tuples(json.loads(text))
        return cls(**fields | {"config": nccl_tests.Config(**tuples(fields["config"]))})
