"""Device names: every usual spelling is parsed, and there is one canonical spelling."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossreduce import DeviceError
from crossreduce.devices import SPELLINGS, Device, canonical, parse
from crossreduce.errors import shown
from crossreduce.values import default_devices, host_devices, locate

READ = {
    "cpu:0": "cpu cpu:0 CPU /device:CPU:0 /job:localhost/task:0/cpu:0 cpu:0#0 cpu:000",
    "cpu:12": "cpu:12 /cpu:12 /device:cpu:12 /replica:0/device:CPU:12 /replica:0/task:0/device:CPU:12",
    "cuda:0": "cuda cuda:0#0 /job:localhost/device:GPU:0",
    "cuda:3": "cuda:3 GPU:3 gpu:3 /gpu:3 /GPU:3 device:GPU:3 /device:GPU:3 /job:localhost/task:0/gpu:3",
    "cpu:1": "/job:localhost/replica:0/task:0/device:CPU:1",
    "tpu:1": "tpu:1",
    "mps:0": "mps",
    "xpu:4": "xpu:4",
    "cuda:0#2": "cuda:0#2",
    "cpu:3#1": "cpu:3#1",
    "host1/cuda:3": "host1/cuda:3",
    "host1/cuda:0#2": "host1/cuda:0#2",
    "node-7.example.org/cpu:0": "node-7.example.org/cpu",
    "worker-1/cuda:3": "/job:worker/task:1/device:GPU:3 /task:1/job:worker/gpu:3 /JOB:worker/TASK:1/DEVICE:GPU:3",
    "worker-12/cpu:1": "/job:worker/replica:0/task:12/device:CPU:1",
    "localhost-1/cpu:0": "/job:localhost/task:1/cpu:0",  # a process other than this one
    "localhost-2/cuda:0": "/task:2/gpu:0",
}


def test_every_usual_spelling_is_parsed():
    """The spellings of torch, JAX, TensorFlow and error messages give one canonical name."""
    for canonical_name, spellings in READ.items():
        for spelling in spellings.split():
            assert canonical(spelling) == str(parse(spelling)) == canonical_name, spelling
    for spelling in SPELLINGS.split(", "):
        parse(spelling.strip('"'))


INVALID = [
    "", " ", "foo", "foo:0", "cpu:-1", "cpu:x", "cpu:", "cpu:1.5", "cpu:+1", "cpu:1:2", "cuda:0#", "cuda:0#-1",
    "cuda:0#x", "cuda:0#1#2", "#1", "0", ":0", "cpu 0", "cpu: 0", "cpu;0", "cpu0", "cpu:0,cpu:1", "cpu:\n0",
    "cpu:0\0", "cpu:\u00b2", "cpu:\u0661", "cuda:0#\u0661", "\u0441pu:0", "/", "//cpu:0", "host1/",
    "host1//cpu:0", "a/b/cpu:0", "-a/cpu:0", "a b/cpu:0", "h\u00f4te/cpu:0", "/host1/cpu:0", "/job:/cpu:0",
    "/job/cpu:0", "/task:x/cpu:0", "/replica:-1/cpu:0", "/job:worker/task:\u00b2/gpu:0", "/job:w/job:w/cpu:0",
    "/job:w/what:0/cpu:0", "/job:worker/task:1", "cpu:12345678901", "/job:worker/task:1/device:",
    "/job:a b/cpu:0", "/device:/cpu:0", "cpu:0 ", " cpu:0", "cpu:0\n", "\tcuda:1",
    "/job:worker/task:\u0661/device:GPU:0", f"/task:{'9' * 5000}/cpu:0",
]  # fmt: skip


def test_invalid_names_are_rejected():
    """An invalid name or another object raises a DeviceError that shows it, its type and the valid spellings."""
    others = [None, 3, 0, 1.5, b"cpu:0", ("cpu", 0), object, ["cpu:0"], {"cpu": 0}, {"cpu:0"}, bytearray(b"cpu:0")]
    for wrong in (*INVALID, *others):
        problem = r"a device's name must not be empty\." if wrong == "" else r"this device name cannot be parsed\."
        value = re.escape(f"given: {shown(wrong)}\n  try:   a name such as {SPELLINGS}")
        with pytest.raises(DeviceError, match=rf"^{problem}\n  {value}$") as caught:
            canonical(wrong)
        assert isinstance(caught.value, ValueError)


hosts = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
indices = st.integers(0, 999_999_999)
devices = st.builds(
    Device, st.just("") | hosts, st.sampled_from(["cpu", "cuda", "tpu", "mps", "xpu"]), indices, st.just(0) | indices
)


@given(devices, st.data())
def test_names_and_devices_correspond_one_to_one(device, data):
    """parse(str(device)) equals the device, and canonical(canonical(x)) == canonical(x) for every spelling x."""
    assert parse(str(device)) == device
    assert canonical(str(device)) == str(device)
    kinds = ["gpu", "GPU", "cuda"] if device.kind == "cuda" else [device.kind, device.kind.upper()]
    place = f"{data.draw(st.sampled_from(kinds))}:{device.index}"
    job = device.host.replace("-", "_") or "localhost"
    once = canonical(data.draw(st.sampled_from(["", "/", "/device:", f"/job:{job}/", "h/"])) + place)
    assert canonical(once) == once
    assert (parse(once).kind, parse(once).index) == (device.kind, device.index)


@given(st.text(alphabet="cpugdal/:#.0123456789JjobtsTKk\u00b2\u0661 \n-_", max_size=24) | st.text(max_size=12))
def test_any_text_is_a_device_or_a_device_error(text):
    """A text is either parsed, and its canonical name is stable, or parsing it raises a DeviceError with a remedy."""
    try:
        name = canonical(text)
    except DeviceError as error:
        assert "\n  try:" in str(error)  # noqa: PT017 - both outcomes are correct; each has its own rule
    else:
        assert canonical(name) == name
        assert re.fullmatch(r"([A-Za-z0-9._-]+/)?(cpu|cuda|tpu|mps|xpu):[0-9]+(#[0-9]+)?", name)


class Placed:
    def __init__(self, device):
        self.device = device


class JaxDevice:
    platform, id = "gpu", 3


class Sharding:
    device_set = frozenset({1, 2})


class Tracer:
    @property
    def device(self):
        raise RuntimeError("a tracer has no device")


def test_locate_reads_the_device_of_each_framework():
    """locate returns ``x.device``, also if it is JAX's, "cpu" for a number, and None for an object without a device. It
    refuses an array on several devices."""
    for text in ("cpu", "/job:localhost/replica:0/task:0/device:CPU:1"):
        assert locate(Placed(text)) == text
    assert canonical(locate(Placed(JaxDevice()))) == "cuda:3"
    assert [locate(x) for x in (Placed(""), Tracer(), [1.0])] == [None] * 3
    assert [locate(x) for x in (3, 1.5, 1j, True)] == ["cpu"] * 4
    with pytest.raises(DeviceError, match=r"spread over several[\s\S]*addressable_shards"):
        locate(Placed(Sharding()))


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        (["cpu"] * 3, host_devices(3)),
        ([None, None], ("cpu:0", "cpu:0#1")),
        (["cuda:1", "cuda:0"], ("cuda:1", "cuda:0")),
        (["cuda:0", "cuda:0#1", "cuda:0"], ("cuda:0", "cuda:0#1", "cuda:0#2")),
        (["cpu:1", "cpu"], ("cpu:1", "cpu:1#1")),
        (["cpu", "GPU:1", "cpu"], ("cpu:0", "cuda:1", "cpu:2")),
        (["/job:localhost/replica:0/task:0/device:CPU:1", "/device:CPU:0"], ("cpu:1", "cpu:0")),
    ],
)
def test_default_devices(places, wanted):
    """Each array gets a device of its own: the one that it is on, or if it is taken, another logical device of it."""
    assert default_devices(places) == wanted
