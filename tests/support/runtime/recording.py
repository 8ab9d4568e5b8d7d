"""An engine of the tests' own: it runs programs like the engine "loop" and records them."""

import numpy as np

from crossreduce.engines.loop import LoopEngine


class RecordingEngine(LoopEngine):
    """See ``crossreduce.engines.base.Engine``. ``runs`` has the shapes of each run, and whether ``out`` was given."""

    name = "recording"

    def __init__(self):
        self.runs = []

    def supports(self, layout):
        return layout.framework.name == "numpy" and layout.is_sized and not layout.mixed

    def bind(self, layout, arrays):
        return [[np.array(x) for x in row] for row in arrays]

    def compile(self, layout, numbers, with_out):
        executable = super().compile(layout, numbers, with_out)
        return RecordingExecutable(self, layout, executable)


class RecordingExecutable:
    prepared = None

    def __init__(self, engine, layout, executable):
        self.engine, self.layout, self.executable = engine, layout, executable

    def run(self, operands, out):
        self.engine.runs.append((tuple(self.layout.shapes), out is not None))
        return self.executable.run(operands, out)


ENGINE = RecordingEngine()
