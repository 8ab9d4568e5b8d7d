"""An engine only for tests. It runs programs on NumPy arrays like the engine "loop", and records its runs."""

import numpy as np

from crossreduce.engines.loop import LoopEngine


class RecordingEngine(LoopEngine):
    """See ``crossreduce.engines.base.Engine``. ``runs`` has the shapes of each run, and whether ``out`` was given."""

    name, runs = "recording", []

    def supports(self, layout):
        return layout.framework.name == "numpy" and layout.is_sized and not layout.mixed

    def bind(self, layout, arrays):
        return [[np.array(x) for x in row] for row in arrays]

    def compile(self, layout, numbers, with_out):
        executable = super().compile(layout, numbers, with_out)
        run = executable.run

        def recorded(operands, out):
            self.runs.append((tuple(layout.shapes), out is not None))
            return run(operands, out)

        executable.run = recorded
        return executable


ENGINE = RecordingEngine()
