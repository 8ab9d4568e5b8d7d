"""What ``import torch`` (2.5 or later) runs: it registers the backend "crossreduce", and serves CROSSREDUCE_FOR_GLOO.

This module is the entry point of the group ``torch.backends``, so that a process that imports only torch has the
backend: a worker of Ray, a spawned process, a launcher of a third party. It is not inside the package ``crossreduce``,
whose import would delay every ``import torch``; the first process group imports that.

With CROSSREDUCE_FOR_GLOO=1, requests for gloo on CPUs get groups of crossreduce. For this, the one function of torch
that makes process groups is wrapped. The variable is read whenever a group is made.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import struct
import sys
import time
from typing import Any, Final, NamedTuple

VARIABLE: Final = "CROSSREDUCE_FOR_GLOO"
VALUES: Final = ("0", "1", "name")
# In a group's store: why a rank does not use gloo, and an address of gloo that makes ranks which read it raise an
# error: no host name, and a socket address of one byte.
REASON: Final = f"{VARIABLE}/reason"
NO_ADDRESS: Final = struct.pack("=qqb", 0, 1, 0)
_LINGER_S: Final = 1.0  # a rank that raises an error in place of gloo may run the store, which others still read
_NEEDED: Final = {"backend", "store", "group_name"}  # parameters of torch's function
_LOG: Final = logging.getLogger("crossreduce")


class InPlaceOfGloo(NamedTuple):
    """The options of a group for a request for gloo: the variable's value, the request's own options, its devices."""

    value: str
    options: Any
    devices: tuple[str, ...]


def register() -> None:
    """Register the backend, unless that was done before or this torch has no ``torch.distributed``."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "CROSSREDUCE"):
        return
    dist.Backend.register_backend("crossreduce", create, extended_api=True, devices=["cpu", "cuda"])
    torch_groups = dist.distributed_c10d
    make = getattr(torch_groups, "_new_process_group_helper", None)
    if make is not None:
        torch_groups._new_process_group_helper = _wrapped(make, torch_groups)
    elif _value() != "0":
        _warn_of_torch("it has no _new_process_group_helper")
    if hasattr(torch_groups, "monitored_barrier"):
        dist.monitored_barrier = torch_groups.monitored_barrier = _barrier_of_ours(torch_groups)
    if hasattr(torch_groups, "_shutdown_backend"):  # torch 2.4
        torch_groups._shutdown_backend = _shutdown_of_ours(torch_groups._shutdown_backend)
    if _value() in VALUES[1:] and hasattr(torch_groups, "ProcessGroupGloo"):
        _announce_direct_groups(torch_groups.ProcessGroupGloo)


def register_vllm() -> None:
    """Let vLLM's groups on CPUs use crossreduce, if CROSSREDUCE_VLLM is set. Each process of vLLM calls this."""
    if os.environ.get("CROSSREDUCE_VLLM"):
        from crossreduce.vllm import install

        install()


def create(options: Any, backend_options: Any = None) -> Any:
    """Make a process group of crossreduce, with the arguments of ``torch.distributed``'s registry."""
    from crossreduce.torch.elastic import create

    return create(options, backend_options)


def _value() -> str:
    return os.environ.get(VARIABLE) or "0"


def _wrapped(make: Any, torch_groups: Any) -> Any:
    """Return torch's function that makes process groups, so that it makes groups of crossreduce in place of gloo's."""

    @functools.wraps(make)
    def make_group(*arguments: Any, **named: Any) -> Any:
        if _value() != "0" and (call := _replaced(make, torch_groups, arguments, named)) is not None:
            return _make_in_place_of_gloo(make, torch_groups, call)
        try:
            made = make(*arguments, **named)
        except RuntimeError as error:
            _raise_reason(make, torch_groups, arguments, named, error)
            raise
        _raise_reason(make, torch_groups, arguments, named)
        _set_default_backend(torch_groups, made)
        return made

    return make_group


def _replaced(make: Any, torch_groups: Any, arguments: Any, named: Any) -> inspect.BoundArguments | None:
    """Return the arguments of a call that requests gloo on CPUs, or ``None`` if gloo, or another backend, must run."""
    try:
        call = inspect.signature(make).bind(*arguments, **named)
        name = str(call.arguments["backend"]).lower()
        if "gloo" not in name and name != "undefined":
            return None
        devices = dict(torch_groups.BackendConfig(call.arguments["backend"]).get_device_backend_map())
        if devices.get("cpu") != "gloo":
            return None
        missing = _NEEDED - set(call.arguments) | {"pg_map", "pg_backend_config"} - set(dir(torch_groups._world))
        reason = _why_gloo(torch_groups, devices, call.arguments)
    except Exception as error:  # noqa: BLE001 - another version of torch must not lose gloo
        _warn_of_torch(f"{type(error).__name__}: {error}")
        return None
    if missing:
        _warn_of_torch(f"it has no {', '.join(sorted(missing))}")
    elif reason:
        say(logging.WARNING, f"gloo runs in spite of {VARIABLE}={_value()}: {reason}")
    return None if missing or reason else call


def _why_gloo(torch_groups: Any, devices: dict[str, str], arguments: dict[str, Any]) -> str:
    """Return why gloo has to serve a request, or an empty text."""
    for device, backend in devices.items():
        if backend != "gloo" and (device, backend) != ("cuda", "nccl"):
            return f'the group also needs "{device}:{backend}"'
    if arguments.get("enable_reconfigure"):
        return "only gloo has enable_reconfigure"
    if getattr(torch_groups, "_use_torchcomms_enabled", bool)():
        return "torchcomms makes the groups"
    options = _options(arguments)
    own = type(options).__module__.split(".")[0] == "crossreduce"
    if options is None or own or (type(options).__name__ == "Options" and "Gloo" not in type(options).__qualname__):
        return ""
    return f"its pg_options are for another backend ({type(options).__qualname__})"


def _options(arguments: dict[str, Any]) -> Any:
    return arguments.get("backend_options", arguments.get("pg_options"))


def _make_in_place_of_gloo(make: Any, torch_groups: Any, call: inspect.BoundArguments) -> Any:
    """Make a group of crossreduce. In torch's tables it has the requested backend, unless the value is name."""
    value, requested = _value(), call.arguments["backend"]
    config = torch_groups.BackendConfig(requested)
    devices = config.get_device_backend_map()
    served = ("cpu", *(device for device, backend in devices.items() if backend == "gloo" and device != "cpu"))
    name = "pg_options" if "pg_options" in inspect.signature(make).parameters else "backend_options"
    call.arguments[name] = InPlaceOfGloo(value, _options(call.arguments), served)
    call.arguments["backend"] = torch_groups.Backend("crossreduce")
    group, store = make(*call.args, **call.kwargs)
    tables = torch_groups._world
    if store is not None and value == "1":
        tables.pg_map[group] = requested, store
        tables.pg_backend_config[group] = str(config)
    say(logging.INFO, f"{VARIABLE}={value}: groups that request gloo on CPUs are groups of crossreduce")
    return group, store


def _raise_reason(make: Any, torch_groups: Any, arguments: Any, named: Any, cause: RuntimeError | None = None) -> None:
    """If a rank has stored why it does not use gloo, raise that. The rank connects in gloo, to end the wait there."""
    data = None
    texts = [each.lower() for each in (*arguments, *named.values()) if isinstance(each, str)]
    if not any("gloo" in each or each == "undefined" for each in texts):
        return  # quickly: this is called for each group
    with contextlib.suppress(Exception):
        call = inspect.signature(make).bind(*arguments, **named).arguments
        if "gloo" in (name := str(call["backend"]).lower()) or name == "undefined":
            store = call["store"]
            for prefix in (f"{call['group_name']}/", "cpu/"):
                store = torch_groups.PrefixStore(prefix, store)
            data = store.get(REASON) if store.check([REASON]) else None
    if data is not None:
        from crossreduce.errors import decoded

        time.sleep(_LINGER_S)
        raise decoded(bytes(data)) from cause


def _set_default_backend(torch_groups: Any, made: Any) -> None:
    """Set gloo as the default of a group, as torch would if no other backend were registered.

    torch before 2.14 does not set it in a group of "cpu:gloo" or the like if any other backend is registered. Then it
    warns "No backend of type 0 found" when the group is destroyed.
    """
    with contextlib.suppress(Exception):
        group, _ = made
        name = str(torch_groups._world.pg_map[group][0])
        if ":" in name and "nccl" not in name and [*torch_groups.Backend._plugins] == ["CROSSREDUCE"]:
            group._set_default_backend(torch_groups.ProcessGroup.BackendType.GLOO)


def _barrier_of_ours(torch_groups: Any) -> Any:
    """Return ``monitored_barrier``, which torch refuses for any group that is not named gloo, for our groups, too."""
    of_gloo = torch_groups.monitored_barrier

    @functools.wraps(of_gloo)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        used = torch_groups.GroupMember.WORLD if group is None else group
        if type(used).__module__.startswith("crossreduce."):
            return used.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
        return of_gloo(group, timeout, wait_all_ranks)

    return monitored_barrier


def _shutdown_of_ours(of_nccl: Any) -> Any:
    """Return torch's function that shuts down a group that is destroyed, which it does only for NCCL, for ours, too."""

    @functools.wraps(of_nccl)
    def shutdown(group: Any) -> None:
        if type(group).__module__.startswith("crossreduce."):
            group.shutdown()
        of_nccl(group)

    return shutdown


def _announce_direct_groups(gloo: Any) -> None:
    """Log a line when a program makes a ``ProcessGroupGloo`` itself: the variable does not change that."""
    begin = gloo.__init__

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        module = str(sys._getframe(1).f_globals.get("__name__"))
        if not module.startswith(("crossreduce.", "torch.distributed.distributed_c10d")):
            say(logging.WARNING, f"gloo runs in spite of {VARIABLE}={_value()}: {module} makes a ProcessGroupGloo")
        begin(self, *arguments, **named)

    gloo.__init__ = __init__


def _warn_of_torch(what: str) -> None:
    import torch

    problem = f"torch {torch.__version__} makes process groups in another way ({what})"
    say(logging.WARNING, f"gloo runs in spite of {VARIABLE}={_value()}: {problem}")


@functools.cache
def say(level: int, text: str) -> None:
    """Log a line, once in a process."""
    _LOG.log(level, text)
