"""Device names: every usual spelling is read, one is written."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossreduce import DeviceError
from crossreduce.devices import Device, canonical, parse
from crossreduce.values import default_devices, host_devices, locate

READ = {
    "cpu:0": "cpu:0",
    "cpu": "cpu:0",
    "CPU": "cpu:0",
    "cpu:12": "cpu:12",
    "cpu:007": "cpu:7",
    "cuda": "cuda:0",
    "cuda:3": "cuda:3",
    "GPU:3": "cuda:3",
    "gpu:3": "cuda:3",
    "/gpu:3": "cuda:3",
    "/GPU:3": "cuda:3",
    "/cpu:1": "cpu:1",
    "/device:CPU:1": "cpu:1",
    "/device:cpu:1": "cpu:1",
    "device:GPU:1": "cuda:1",
    "/device:GPU:2": "cuda:2",
    "tpu:1": "tpu:1",
    "mps": "mps:0",
    "xpu:4": "xpu:4",
    "cuda:0#2": "cuda:0#2",
    "cuda:0#0": "cuda:0",
    "cpu:3#1": "cpu:3#1",
    "host1/cuda:3": "host1/cuda:3",
    "host1/cuda:0#2": "host1/cuda:0#2",
    "node-7.example.org/cpu": "node-7.example.org/cpu:0",
    "/job:worker/task:1/device:GPU:3": "worker-1/cuda:3",
    "/job:worker/replica:0/task:12/device:CPU:1": "worker-12/cpu:1",
    "/task:1/job:worker/gpu:3": "worker-1/cuda:3",
    "/job:localhost/replica:0/task:0/device:CPU:1": "cpu:1",
    "/job:localhost/task:0/gpu:3": "cuda:3",
    "/job:localhost/device:GPU:0": "cuda:0",
    "/job:localhost/task:1/cpu:0": "localhost-1/cpu:0",  # another process than this one
    "/task:2/gpu:0": "localhost-2/cuda:0",
    "/replica:0/device:CPU:1": "cpu:1",
    "/replica:0/task:0/device:CPU:1": "cpu:1",
    "/JOB:worker/TASK:2/DEVICE:GPU:0": "worker-2/cuda:0",
}


@pytest.mark.parametrize(("given_", "wanted"), READ.items())
def test_every_usual_spelling_is_read(given_, wanted):
    """Ours, torch's, JAX's and TensorFlow's spellings of one device give one canonical name."""
    assert canonical(given_) == wanted
    assert str(parse(given_)) == wanted


def test_parts_of_a_name():
    """A parsed device has a host, a kind, an index and a logical index; its physical device has no logical one."""
    assert parse("/job:worker/task:1/device:GPU:3") == Device("worker-1", "cuda", 3, 0)
    device = parse("host1/GPU:3#5")
    assert (device.host, device.kind, device.index, device.logical) == ("host1", "cuda", 3, 5)
    assert device.physical == "host1/cuda:3"
    assert parse("cpu").physical == "cpu:0"


GARBAGE = [
    "", " ", "foo", "foo:0", "cpu:-1", "cpu:x", "cpu:", "cpu:1.5", "cpu:+1", "cpu:1:2", "cuda:0#", "cuda:0#-1",
    "cuda:0#x", "cuda:0#1#2", "#1", "0", ":0", "cpu 0", "cpu: 0", "cpu;0", "cpu0", "cpu:0,cpu:1", "cpu:\n0",
    "cpu:0\0", "cpu:\u00b2", "cpu:\u0661", "cuda:0#\u0661", "\u0441pu:0", "/", "//cpu:0", "host1/",
    "host1//cpu:0", "a/b/cpu:0", "-a/cpu:0", "a b/cpu:0", "h\u00f4te/cpu:0", "/host1/cpu:0", "/job:/cpu:0",
    "/job/cpu:0", "/task:x/cpu:0", "/replica:-1/cpu:0", "/job:worker/task:\u00b2/gpu:0", "/job:w/job:w/cpu:0",
    "/job:w/what:0/cpu:0", "/job:worker/task:1", "cpu:12345678901", "/job:worker/task:1/device:",
    "/job:a b/cpu:0", "/device:/cpu:0",
]  # fmt: skip


@pytest.mark.parametrize("garbage", [*GARBAGE, None, 3, 0, 1.5, b"cpu:0", ("cpu", 0), object])
def test_garbage_raises_and_says_what_was_given(garbage):
    """What is no device's name is a DeviceError that shows it, its type, and the spellings that are read."""
    with pytest.raises(DeviceError) as caught:
        canonical(garbage)
    text = str(caught.value)
    shown = " ".join(repr(garbage).split())
    assert f"given: {shown} ({type(garbage).__name__})" in text
    assert all(spelling in text for spelling in ('"cpu:0"', '"host1/cuda:3"', '"cuda:0#2"', "/job:worker/task:1"))
    assert isinstance(caught.value, ValueError)


def test_empty_name_is_said_to_be_empty():
    """An empty name, which a tensor without a device has, gets a message of its own."""
    with pytest.raises(DeviceError, match="must not be empty"):
        parse("")


@pytest.mark.parametrize("garbage", [["cpu:0"], {"cpu": 0}, {"cpu:0"}, bytearray(b"cpu:0")])
def test_unhashable_garbage_raises_too(garbage):
    """A list or a dict in place of a name is a DeviceError, not the cache's TypeError."""
    with pytest.raises(DeviceError, match="no device is spelled like this"):
        canonical(garbage)


@pytest.mark.parametrize("blank", ["cpu:0 ", " cpu:0", "cpu:0\n", "\tcuda:1"])
def test_blanks_round_a_name_are_garbage(blank):
    """A name with blanks round it is no spelling of a device."""
    with pytest.raises(DeviceError, match="no device is spelled like this"):
        canonical(blank)


def test_digits_are_ascii_in_jobs_and_tasks_too():
    """Only 0 to 9 are digits: an Arabic one in a task is garbage, as it is in an index."""
    with pytest.raises(DeviceError, match="no device is spelled like this"):
        canonical("/job:worker/task:\u0661/device:GPU:0")


def test_a_task_of_thousands_of_digits_is_garbage():
    """No text, however long, gets another error than DeviceError."""
    with pytest.raises(DeviceError, match="no device is spelled like this"):
        canonical(f"/task:{'9' * 5000}/cpu:0")


def test_different_hosts_have_different_names():
    """Two tasks that TensorFlow tells apart are two hosts here: their devices never share a name."""
    assert canonical("/job:worker1/task:0/cpu:0") != canonical("/job:worker/task:10/cpu:0")


hosts = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
indices = st.integers(0, 999_999_999)
devices = st.builds(
    Device, st.just("") | hosts, st.sampled_from(["cpu", "cuda", "tpu", "mps", "xpu"]), indices, st.just(0) | indices
)


@given(devices)
def test_parse_reads_what_str_writes(device):
    """parse(str(device)) is the device, so names and devices correspond one to one."""
    assert parse(str(device)) == device
    assert canonical(str(device)) == str(device)


@given(devices, st.data())
def test_canonical_names_are_fixed(device, data):
    """canonical(canonical(x)) == canonical(x), whatever spelling x is in."""
    kind = data.draw(
        st.sampled_from(["gpu", "GPU", "cuda"] if device.kind == "cuda" else [device.kind, device.kind.upper()])
    )
    place = f"{kind}:{device.index}"
    spelling = data.draw(
        st.sampled_from(
            [
                place,
                f"/{place}",
                f"/device:{place}",
                f"/job:{device.host.replace('-', '_') or 'localhost'}/{place}",
                f"h/{place}",
            ]
        )
    )
    once = canonical(spelling)
    assert canonical(once) == once
    assert parse(once).kind == device.kind
    assert parse(once).index == device.index


@given(st.text(alphabet="cpugdal/:#.0123456789JjobtsTKk\u00b2\u0661 \n-_", max_size=24) | st.text(max_size=12))
def test_any_text_is_a_device_or_a_device_error(text):
    """No text gets another exception, and what is read keeps its canonical name."""
    try:
        name = canonical(text)
    except DeviceError as error:
        assert "\n  try:" in str(error)  # noqa: PT017 - either outcome is right; this is what each must be
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


def test_locate_reads_each_frameworks_device():
    """An array's device is its attribute's text, a JAX device's platform and number, or unknown."""
    assert locate(Placed("cpu")) == "cpu"
    assert (
        locate(Placed("/job:localhost/replica:0/task:0/device:CPU:1")) == "/job:localhost/replica:0/task:0/device:CPU:1"
    )
    assert canonical(locate(Placed(JaxDevice()))) == "cuda:3"
    assert [locate(x) for x in (Placed(""), Tracer(), [1.0])] == [None] * 3
    assert [locate(x) for x in (3, 1.5, 1j, True)] == ["cpu"] * 4


def test_a_sharded_array_has_no_one_device():
    """An array that is spread over several devices is refused, with the way out."""
    with pytest.raises(DeviceError, match=r"spread over several[\s\S]*addressable_shards"):
        locate(Placed(Sharding()))


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        (["cpu"] * 3, ("cpu:0", "cpu:1", "cpu:2")),
        ([None, None], ("cpu:0", "cpu:0#1")),
        (["cuda:0"] * 3, ("cuda:0", "cuda:0#1", "cuda:0#2")),
        (["cuda:1", "cuda:0"], ("cuda:1", "cuda:0")),
        (["cuda:0", "cuda:0#1", "cuda:0"], ("cuda:0", "cuda:0#1", "cuda:0#2")),
        (["cpu:1", "cpu"], ("cpu:1", "cpu:1#1")),
        (["cpu", "GPU:1", "cpu"], ("cpu:0", "cuda:1", "cpu:2")),
        (["/job:localhost/replica:0/task:0/device:CPU:1", "/device:CPU:0"], ("cpu:1", "cpu:0")),
    ],
)
def test_default_devices(places, wanted):
    """Each array gets a device of its own where it is: host memory has as many as there are replicas."""
    assert default_devices(places) == wanted


@given(st.lists(st.sampled_from(["cpu", None, "cuda:0", "cuda:1", "cuda:0#1", "cpu:1"]), min_size=1, max_size=12))
def test_default_devices_are_distinct_and_in_place(places):
    """However arrays share places, every one has its own device, a part of the physical one it is on."""
    names = default_devices(places)
    assert len(set(names)) == len(places) == len(names)
    for place, name in zip(places, names, strict=True):
        if place not in ("cpu", None):
            assert parse(name).physical == parse(place).physical


def test_host_devices():
    """Host memory is cpu:0 to cpu:n-1."""
    assert host_devices(3) == ("cpu:0", "cpu:1", "cpu:2")
