"""The topology that NCCL or RCCL writes: the XML of NCCL_TOPO_DUMP_FILE.

Input: the text of the file. Output: a ``Wiring`` of its GPUs. The GPU whose ``dev`` is 0 is ``cuda:0``, and so on. Text
with a document type, which could define entities, is refused, and so is text that is too long or too deeply nested.

``<nvlink>`` and ``<xgmi>`` entries join GPUs. Each stands for a number of links, whose kind follows from the GPU's
``sm`` or ``gcn``. All NVLinks to devices of the PCI class of an NVSwitch lead to one switch, ``nvswitch``. The wiring
includes links of PCIe and between CPUs only if the entries do not join all GPUs. A PCI bridge with GPUs on only one
branch is part of a link, and not a node. Network cards are left out, because the file does not state to which other
cards they lead.

Source: NVIDIA/nccl src/graph/xml.cc, topo.cc and topo.h for the format, the meaning of absent values and the models of
CPUs; ROCm/rccl src/graph/topo.cc for ``<xgmi>``; ROCm/rccl tools/topo_expl/models has files for comparison.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, NamedTuple, NoReturn

from ...errors import ArgumentError, shown
from ..link_kinds import kind, nvlink
from ..links import Link, Wiring
from ..routes import is_connected

# These limits are far above real files: RCCL's 54 files of release 5.4.3 have at most 18,000 characters, 240 tags, 8
# levels of elements, 8 CPUs.
LONGEST: Final = 4 << 20
MOST_TAGS: Final = 20_000
DEEPEST: Final = 64
MOST_CPUS: Final = 256
DUMP: Final = "run a job on the machine with NCCL_TOPO_DUMP_FILE=topology.xml and load the file that it writes"

_PCIE: Final = {"2.5": "pcie1", "5": "pcie2", "8": "pcie3", "16": "pcie4", "32": "pcie5", "64": "pcie6"}
# The start of a GPU's gcn after "gfx"; RCCL writes 910 for gfx90a.
_XGMI: Final = {"95": "xgmi-mi350", "94": "xgmi-mi300", "90a": "xgmi-mi200", "910": "xgmi-mi200", "90": "xgmi-vega"}
_BUS: Final = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{2}):([0-9a-f]{2}\.[0-9a-f])")
# Modules (SXM, OAM) always have NVLink or xGMI. The sm or gcn of GPUs that exist as modules, and the PCI device numbers
# of the modules (P100, V100, A100, H100, H200, B200; MI250, MI300X, MI325X; from general knowledge of pci-ids.ucw.cz).
_CHIPS: Final = {"60", "70", "80", "90", "100", "910", "gfx90a", "gfx942"}
_MODULES: Final = re.compile("15f9|1db[158]|20b[02]|233[05]|2901|740[8c]|74a[15]")


@dataclass(slots=True)
class _Element:
    tag: str
    attributes: dict[str, str]
    line: int
    children: list[_Element] = field(default_factory=list)

    def all(self, tag: str) -> list[_Element]:
        return [child for child in self.children if child.tag == tag]

    def get(self, name: str) -> str:
        return self.attributes.get(name, "").strip().lower()

    def integer(self, name: str, default: int = -1) -> int:
        return int(self.get(name)) if re.fullmatch("[0-9]{1,6}", self.get(name)) else default

    @property
    def bus(self) -> str:
        """The PCI bus id in NCCL's spelling, 0000:07:00.0. The driver would write 00000000:07:00.0."""
        match = _BUS.fullmatch(self.get("busid") or self.get("target"))
        return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}" if match else self.get("busid") or self.get("target")

    def refuse(self, problem: str, remedy: str = DUMP) -> NoReturn:
        given = " ".join((f"<{self.tag}", *(f'{name}="{value}"' for name, value in self.attributes.items())))
        raise ArgumentError.of(problem, f"line {self.line}: {' '.join(given.split())[:160]}>", remedy)


class _Cpu(NamedTuple):
    name: str
    host: str  # the start of all names on the host, "" or "host0/"
    element: _Element


class _Gpu(NamedTuple):
    name: str
    cpu: _Cpu
    pci: _Element  # the PCI device, which contains the <gpu>
    element: _Element


def read_nccl_xml(text: str) -> Wiring:
    """Return the wiring in NCCL's ``<system version="1">`` or RCCL's ``version="2"``.

    PCIe links have the speed and width in the file. Where these are missing, as on some virtual machines, links have
    NCCL's default, x16 at 8 GT/s. Links between CPUs have the speed that NCCL assumes for their vendor and model.

    Raises:
      ArgumentError: the text is not such XML, has no GPUs, or has no NVLink or xGMI although its GPUs always have them.

    >>> text = '''<system version="1"><cpu numaid="0">
    ... <pci busid="0000:01:00.0" link_speed="16.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="89"/></pci>
    ... <pci busid="0000:02:00.0" link_speed="16.0 GT/s PCIe" link_width="8"><gpu dev="1" sm="89"/></pci>
    ... </cpu></system>'''
    >>> [(link.src, link.dst, str(link.bandwidth)) for link in read_nccl_xml(text).links[::2]]
    [('cpu0', 'cuda:0', '63/2'), ('cpu0', 'cuda:1', '63/4')]
    """
    system = _parse(text)
    if system.tag == "algo":
        system.refuse("this is a plan in MSCCL XML, not a topology.", "crossreduce verify FILE")
    if system.tag != "system" or system.get("version") not in ("1", "2"):
        system.refuse('NCCL\'s topology starts with <system version="1">, RCCL\'s with version="2".')
    cpus = _cpus(system)
    gpus = _gpus(system, cpus)
    devices = [gpu.name for gpu in gpus]
    fast = _nvlinks(gpus)
    if len(gpus) > 1 and not fast:
        _check_modules(gpus)
    links = list(fast.values())
    if not is_connected(devices, links):
        links += [link for link in _pcie_links(cpus, gpus) if link[:2] not in fast]
    return Wiring.of(devices, links)


def _cpus(system: _Element) -> list[_Cpu]:
    """Return the NUMA nodes. In a file of several hosts, such as a rack, their names start with that of the host."""
    elements = system.all("cpu")
    if len(elements) > MOST_CPUS:
        system.refuse(f"a topology has at most {MOST_CPUS} CPUs.", "")
    hosts = list(dict.fromkeys(element.get("host_hash") for element in elements))
    cpus: dict[str, _Cpu] = {}
    for element in elements:
        if not re.fullmatch("-1|[0-9]{1,6}", element.get("numaid")):
            element.refuse("a <cpu> must have the number of its NUMA node.", 'numaid="0"')
        host = f"host{hosts.index(element.get('host_hash'))}/" if len(hosts) > 1 else ""
        cpu = _Cpu(f"{host}cpu{element.get('numaid')}", host, element)
        if cpus.setdefault(cpu.name, cpu) is not cpu:
            element.refuse("a NUMA node appears twice in the file.", "one <cpu> per node")
    return list(cpus.values())


def _gpus(system: _Element, cpus: list[_Cpu]) -> list[_Gpu]:
    """Return the GPUs, sorted by host and number."""
    elements = [(cpu, pci, pci.all("gpu")[0]) for cpu in cpus for pci in _pci_devices(cpu.element) if pci.all("gpu")]
    if not elements:
        classes = [pci.get("class") for cpu in cpus for pci in _pci_devices(cpu.element)]
        missing = sum(name.startswith(("0x03", "0x12")) for name in classes)  # display controllers and accelerators
        system.refuse(f"the file has no <gpu>. NCCL asks the driver about {missing} of its PCI devices that are GPUs.")
    gpus: dict[str, _Gpu] = {}
    for number, (cpu, pci, element) in enumerate(elements):
        name = f"{cpu.host}cuda:{element.integer('dev', number)}"
        gpu = gpus.setdefault(name, _Gpu(name, cpu, pci, element))
        if gpu.element is not element:
            element.refuse(f"two GPUs are called {name}.", "a different dev for each")
    return sorted(gpus.values(), key=lambda gpu: [int(digits) for digits in re.findall("[0-9]+", gpu.name)])


def _pci_devices(element: _Element) -> Iterator[_Element]:
    """Yield all PCI devices below a CPU or a PCI bridge, in the order of the file."""
    for pci in element.all("pci"):
        yield pci
        yield from _pci_devices(pci)


def _nvlinks(gpus: list[_Gpu]) -> dict[tuple[str, str], Link]:
    """Return the links of NVLink and xGMI by (src, dst); parallel links are added up."""
    by_bus = {(gpu.cpu.host, gpu.pci.bus): gpu.name for gpu in gpus}
    links: dict[tuple[str, str], Link] = {}
    for gpu in gpus:
        for entry in (*gpu.element.all("nvlink"), *gpu.element.all("xgmi")):
            if entry.integer("count") < 1:
                entry.refuse("an entry must have the number of its links.", 'count="2"')
            # A peer GPU has an entry for the other direction, but a switch or a CPU lacks it.
            peer, both_ways = by_bus.get((gpu.cpu.host, entry.bus), ""), False
            if entry.get("tclass").startswith("0x068000"):
                peer, both_ways = "nvswitch", True
            elif entry.get("tclass").startswith("0x068001"):  # a POWER9 CPU, which has NVLink itself
                peer, both_ways = gpu.cpu.name, True
            elif not entry.get("target"):
                entry.refuse("an entry must have the target of its links.", 'target="0000:07:00.0"')
            if peer == gpu.name:
                problem = f"the links of {gpu.name} lead to itself"
                entry.refuse(f"{problem}, so the file does not define the links between GPUs.")
            if peer:  # otherwise the peer is not in the file, since the job that wrote the file did not use this GPU
                link_kind = kind(_kinds(gpu, entry)[peer == "nvswitch"])
                for link in link_kind.between(gpu.name, peer, entry.integer("count"), "raw")[: 1 + both_ways]:
                    parallel = links.get(link[:2])
                    links[link[:2]] = link._replace(bandwidth=link.bandwidth + (parallel.bandwidth if parallel else 0))
    return links


def _kinds(gpu: _Gpu, entry: _Element) -> tuple[str, str]:
    """Return the kinds of the links of a GPU to another GPU and to a switch."""
    if entry.tag == "nvlink" and gpu.element.integer("sm") >= 0:
        return nvlink(gpu.element.integer("sm"))
    chip = gpu.element.get("gcn").removeprefix("gfx")
    xgmi = next((link_kind for start, link_kind in _XGMI.items() if chip.startswith(start)), None)
    if entry.tag == "nvlink" or xgmi is None:
        gpu.element.refuse("a GPU must have its model: sm, or gcn if its links are xGMI.", 'sm="80", gcn="gfx942"')
    return xgmi, xgmi


def _check_modules(gpus: list[_Gpu]) -> None:
    """Refuse a file without NVLinks if its GPUs are, or may be, of a kind that always has them."""
    for gpu in gpus:
        board = gpu.pci.get("device").removeprefix("0x")
        if _MODULES.fullmatch(board) or (not board and (gpu.element.get("gcn") or gpu.element.get("sm")) in _CHIPS):
            problem = "GPUs of this kind are joined by NVLink or xGMI, but the file has no such entry."
            gpu.element.refuse(problem, f"{DUMP}; for a PCIe card, <pci> must have its device number")


def _pcie_links(cpus: list[_Cpu], gpus: list[_Gpu]) -> list[Link]:
    """Return the links of PCIe, and those between the CPUs that have GPUs."""
    names = {id(gpu.pci): gpu.name for gpu in gpus}
    links: list[Link] = []
    with_gpus: list[_Cpu] = []

    # The nodes directly below a CPU or bridge, each with the width and kind of the link to it.
    def branches(element: _Element) -> list[tuple[str, Fraction, str]]:
        return [branch for pci in element.all("pci") for branch in branch_of(pci)]

    def branch_of(pci: _Element) -> list[tuple[str, Fraction, str]]:
        """Return the entry of a GPU or bridge in ``branches``, or [] without GPUs; add the links below it."""
        width, pcie = _width(pci)
        if id(pci) in names:
            return [(names[id(pci)], width, pcie)]
        below = branches(pci)
        if len(below) > 1:
            bridge = f"{host}pci-{pci.bus.replace(':', '-')}"
            connect(bridge, below)
            return [(bridge, width, pcie)]
        # With one branch, the bridge is only a part of its link, which is as fast as the slower part.
        return [min(branch, (branch[0], width, pcie), key=lambda link: link[1] * kind(link[2]).raw) for branch in below]

    def connect(node: str, below: list[tuple[str, Fraction, str]]) -> None:
        for name, width, pcie in below:
            links.extend(kind(pcie).between(node, name, width, "raw"))

    for cpu in cpus:
        host = cpu.host  # for ``branch_of``
        if below := branches(cpu.element):
            connect(cpu.name, below)
            with_gpus.append(cpu)
    pairs = [(a, b) for a in with_gpus for b in with_gpus if a is not b and a.host == b.host]
    links += [kind(_cpu_link_kind(a.element)).between(a.name, b.name, 1, "effective")[0] for a, b in pairs]
    return links


def _width(pci: _Element) -> tuple[Fraction, str]:
    """Return the width of a device's PCIe link, as its lanes divided by 16, and its kind."""
    lanes = pci.integer("link_width")
    rate = re.match(r"([0-9]+(?:\.5)?)(?:\.0)? gt/s", pci.get("link_speed"))
    return Fraction(lanes if 1 <= lanes <= 32 else 16, 16), _PCIE.get(rate[1] if rate else "", "pcie3")


def _cpu_link_kind(cpu: _Element) -> str:
    """Return the kind of link between a CPU and the other CPUs of its host."""
    arch, family, model = cpu.get("arch"), cpu.integer("familyid"), cpu.integer("modelid")
    vendor = cpu.get("vendor")
    if arch in ("arm64", "ppc64"):
        return "cpu-arm" if arch == "arm64" else "cpu-power9"
    if vendor == "genuineintel":
        if family == 6 and (model >= 0xCF or 0xAD <= model <= 0xAF):
            return "cpu-emerald-rapids"
        if family == 6 and model >= 0x8F:
            return "cpu-sapphire-rapids"
        return "cpu-skylake" if family == 6 and model >= 0x55 else "cpu-broadwell"
    if vendor == "authenticamd":  # older versions of NCCL write family 15 + 11 as 15 + 11 * 16 = 0xBF
        return {26: "cpu-zen5", 0xBF: "cpu-zen5", 25: "cpu-zen3", 0xAF: "cpu-zen3"}.get(family, "cpu-zen2")
    if vendor not in ("centaurhauls", "shanghai"):
        known = "arch arm64 or ppc64, or vendor GenuineIntel, AuthenticAMD, CentaurHauls or Shanghai"
        cpu.refuse(f"a <cpu> must have {known}, which determines the speed of the link between CPUs.")
    return "cpu-yongfeng" if (family, model) == (7, 0x5B) else "cpu-zhaoxin"


def _parse(text: str) -> _Element:
    """Parse XML into elements, within the limits above."""
    if not isinstance(text, str):
        raise ArgumentError.of("NCCL's topology must be text.", shown(text), "open(path).read()")
    if len(text) > LONGEST or text.count("<") > MOST_TAGS:
        given = f"{len(text)} characters, {text.count('<')} tags"
        raise ArgumentError.of(f"a topology must have at most {LONGEST} characters and {MOST_TAGS} tags.", given)
    from xml.parsers import expat

    document = _Element("", {}, 0)
    path = [document]

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = _Element(tag, attributes, parser.CurrentLineNumber)
        if len(path) > DEEPEST:
            element.refuse(f"a topology has at most {DEEPEST} levels of elements.", "")
        parents = [parent.tag for parent in path[1:]]
        if tag == "gpu" and parents[:1] == ["system"] and (parents[1:2] != ["cpu"] or {*parents[2:]} != {"pci"}):
            element.refuse("a <gpu> must be in a <pci>, which is in a <cpu>: NCCL does not read it here.")
        path[-1].children.append(element)
        path.append(element)

    def end(_: str) -> None:
        path.pop()

    def doctype(name: str, *_: object) -> None:
        element = _Element("!DOCTYPE", {"name": name}, parser.CurrentLineNumber)
        element.refuse("a document type is not allowed in a topology.", "")

    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.StartDoctypeDeclHandler = doctype
    text = _strip_comments(text)
    try:
        parser.Parse(text.encode("utf-8", "replace"), True)
    except expat.ExpatError as error:
        here = text.split("\n")[error.lineno - 1].strip()[:160]
        raise ArgumentError.of(f"this is not XML: {error}.", f"line {error.lineno}: {here}", DUMP) from error
    return document.children[0]


def _strip_comments(text: str) -> str:
    """Remove comments but keep line breaks; RCCL's comments start with more dashes than XML allows."""
    kept: list[str] = []
    here = 0
    while (start := text.find("<!--", here)) >= 0 and (end := text.find("-->", start + 4)) >= 0:
        kept += [text[here:start], "\n" * text.count("\n", start, end)]
        here = end + 3
    return "".join([*kept, text[here:]])
