"""A pytest plugin for scripts/suites: lets foreign tests run on CPUs, with crossreduce or with their own baseline.

Variables of the environment: SUITES_FRAMEWORK is "pytorch" or "tensorflow"; SUITES_WITH is "crossreduce" or "baseline";
SUITES_OP is the cross-device op that TensorFlow's strategies use; SUITES_CPU=1 runs torch's tests for GPUs on CPUs.

With crossreduce, the texts of its errors are not compared with those that a test expects; their classes are.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import multiprocessing
import os
import sys
import unittest
from datetime import timedelta

OURS = os.environ["SUITES_WITH"] == "crossreduce"


def ignore_texts_of_errors() -> None:
    """Compare only the classes of the errors of crossreduce."""
    from crossreduce.errors import ReductionError

    handle = unittest.case._AssertRaisesContext.__exit__

    def leave(self, kind, error, traceback):
        if isinstance(error, ReductionError) and issubclass(kind, self.expected):
            self.expected_regex = None
        return handle(self, kind, error, traceback)

    unittest.case._AssertRaisesContext.__exit__ = leave


def patch_torch() -> None:
    """Start ranks by fork, so that they inherit the patches; with crossreduce, it takes the place of gloo."""
    import torch
    import torch.testing._internal.common_distributed as common

    fork = multiprocessing.get_context("fork")
    common.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork.Process)
    continuous = common.MultiProcContinuousTest  # its former name, with a spelling error, is still in old tests
    common.MultiProcContinousTest = continuous
    spawn, set_up = continuous._spawn_processes.__func__, continuous.setUp

    def spawn_by_fork(cls, world_size):
        real = torch.multiprocessing.Process, torch.multiprocessing.Queue
        torch.multiprocessing.Process, torch.multiprocessing.Queue = fork.Process, fork.Queue
        try:
            spawn(cls, world_size)
        finally:
            torch.multiprocessing.Process, torch.multiprocessing.Queue = real

    def set_up_again(self):
        """Start new ranks after a failed test, so that the tests after it run."""
        cls = type(self)
        if cls.poison_pill:
            for process in cls.processes:
                process.kill()
            cls.poison_pill = cls._processes_spawned = False
        set_up(self)

    continuous._spawn_processes, continuous.setUp = classmethod(spawn_by_fork), set_up_again
    if os.environ.get("SUITES_CPU"):
        common.skip_if_lt_x_gpu = common.requires_nccl = lambda *_, **__: lambda test: test
        torch.accelerator.device_count = lambda: 4
    if OURS:
        replace_gloo()


def replace_gloo() -> None:
    """Make torch create groups of crossreduce for the backend "gloo" and for ``ProcessGroupGloo``."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    import crossreduce.torch  # noqa: F401 - registers the backend
    from crossreduce.torch.group import Group

    create, real, numbers = c10d._new_process_group_helper, dist.ProcessGroupGloo, itertools.count()
    signature = inspect.signature(create)

    def create_ours(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        if not isinstance(bound.arguments.get("backend_options"), real._Options):  # such options are gloo's own
            name = str(bound.arguments["backend"])
            name = "crossreduce" if name in ("gloo", "undefined") else name.replace("cpu:gloo", "cpu:crossreduce")
            bound.arguments["backend"] = c10d.Backend(name)
        return create(*bound.args, **bound.kwargs)

    class ProcessGroupGloo:
        _Options, Options = real._Options, getattr(real, "Options", None)
        create_device, create_default_device = real.create_device, real.create_default_device

        def __new__(cls, store, rank, size, opts=None, timeout=None):
            if "crossreduce" in sys._getframe(1).f_globals["__name__"]:  # our own inner group
                return real(store, rank, size, timeout=timeout)
            limit = timeout or (opts._timeout if opts is not None else timedelta(seconds=50))
            limit = limit if isinstance(limit, timedelta) else timedelta(seconds=limit)
            return Group(store, rank, size, limit, f"suites{next(numbers)}")

    c10d._new_process_group_helper, dist.ProcessGroupGloo = create_ours, ProcessGroupGloo


def patch_tensorflow() -> None:
    """Replace the GPUs of strategies by logical CPUs, and make every MirroredStrategy use one cross-device op."""
    import tensorflow as tf
    from absl import flags
    from tensorflow.python.distribute import cross_device_ops, mirrored_strategy, strategy_combinations, test_util

    flags.FLAGS(["suites"])
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    test_util.set_logical_devices_to_at_least = lambda *_: None
    with_key, no_merge = "_mirrored_strategy_with_collective_key_base", "_mirrored_strategy_with_no_merge_call"
    for name, function, cpus in (
        ("one_gpu", with_key, ["/cpu:1"]),
        ("gpu_and_cpu", with_key, ["/cpu:1", "/cpu:0"]),
        ("two_gpus", with_key, ["/cpu:1", "/cpu:2"]),
        ("two_gpus_no_merge_call", no_merge, ["/cpu:1", "/cpu:2"]),
    ):
        strategy = getattr(strategy_combinations, f"mirrored_strategy_with_{name}")
        strategy._distribution_fn = functools.partial(getattr(strategy_combinations, function), cpus)
        strategy.required_gpus = strategy.required_physical_gpus = 0
    op = os.environ["SUITES_OP"]
    if OURS:
        from absl.testing import absltest

        import crossreduce.tensorflow as ours

        match = absltest.TestCase.assertRegexMatch
        absltest.TestCase.assertRegexMatch = lambda self, text, *rest: "  given: " in text or match(self, text, *rest)
        for name in ours.__all__:
            setattr(cross_device_ops, name, getattr(ours, name))
        cross_device_ops.NcclAllReduce = type(
            "NcclAllReduce",
            (ours.AllReduceCrossDeviceOps,),
            {"__init__": lambda self, num_packs=1: ours.AllReduceCrossDeviceOps.__init__(self, "nccl", num_packs)},
        )
    elif op == "AllReduceCrossDeviceOps":  # TensorFlow's requires GPUs and NCCL
        op = "ReductionToOneDevice"
    extended, make = mirrored_strategy.MirroredExtended, getattr(cross_device_ops, op)
    initialize = extended.__init__

    @functools.wraps(initialize)
    def initialize_with_op(self, strategy, devices=None, cross_device_ops=None):
        initialize(self, strategy, devices=devices, cross_device_ops=cross_device_ops or make())

    extended.__init__ = initialize_with_op
    extended._get_cross_device_ops = lambda self, _: self._cross_device_ops


if OURS:
    ignore_texts_of_errors()
(patch_torch if os.environ["SUITES_FRAMEWORK"] == "pytorch" else patch_tensorflow)()
