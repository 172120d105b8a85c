"""A small internet of network namespaces: public hosts, hosts behind NAT routers, and ways to hurt all of them.

Everything lives in namespaces of its own (ip-netns(8)), the wires between them included, so that nothing of it can
reach the machine's network and nothing outside can reach it. It needs Linux, root, and the program ``ip``, and
``iptables`` for whatever is more than hosts with public addresses; `why_not` says what is missing. Names carry the id
and the start time of the process that made them, so that test runs do not meddle with one another, and what a run that
was killed has left behind is removed by the next.

The public part is one Ethernet bridge that carries 45.0.0.0/8, each host in a /16 of its own: addresses that count as
public in the program under test, and as different networks. Behind routers, everybody uses 192.168.1.0/24, as at home.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
PREFIX = "fnat"
NETNS_FOLDER = Path("/run/netns")
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x80000, 2
PACKAGES = {"ip": "iproute2", "iptables": "iptables"}
"""Programs, and what they are installed with."""

_GONE_S = 10.0
"""How long killed processes may take until their namespace is empty."""


class Ports(enum.Enum):
    """How a router chooses the outside port of a connection from inside."""

    PRESERVED = "preserved"
    """The same as inside while it is free, as most home routers do: another peer can predict it."""
    RANDOM = "random"
    """By chance for every connection, as carrier-grade NAT does: nobody can predict it."""


class OnUnsolicited(enum.Enum):
    """What a router does with a connection from outside that nobody inside has asked for."""

    DROP = "DROP"
    """Says nothing, as home routers do."""
    RESET = "REJECT"
    """Answers with a reset."""


def why_not(programs: Sequence[str] = tuple(PACKAGES)) -> str:
    """Why no internet can be made here that needs these programs; empty when it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        packages = " and ".join(PACKAGES[program] for program in missing)
        return f"{' and '.join(missing)} not found: install {packages}"
    # A container's root may lack the capability.
    name = f"{_own_prefix()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespace can be made: {tried.stderr.strip()}"
    run("ip", "netns", "del", name)
    return ""


class Internet:
    """See the head of this file. Use as a context manager; when it is left, all processes in it are killed."""

    def __init__(self) -> None:
        self.namespaces: list[str] = []
        self._wires = itertools.count()
        self._networks = itertools.count(1)
        self._backbone = ""

    def __enter__(self) -> Internet:
        remove_leftovers()
        self._backbone = self.add_namespace("net")
        self.make_bridge(self._backbone)
        return self

    def __exit__(self, *_: object) -> None:
        _remove(self.namespaces)

    def host(self, name: str) -> Host:
        """A host with a public address and no firewall."""
        host = Host(self, self.add_namespace(name))
        self.plug(host.namespace, "eth0", self._backbone)
        host.set_address(self.new_address())
        return host

    def router(
        self, name: str, *, ports: Ports = Ports.PRESERVED, on_unsolicited: OnUnsolicited = OnUnsolicited.DROP
    ) -> Router:
        """A NAT router with a public address, that lets connections out and none in."""
        namespace = self.add_namespace(name)
        self.plug(namespace, "wan", self._backbone)
        self.make_bridge(namespace)
        return Router(self, namespace, ports, on_unsolicited)

    def new_address(self) -> str:
        """A public address in a network where nobody is yet."""
        return f"45.{next(self._networks)}.0.1/8"

    def add_namespace(self, name: str) -> str:
        namespace = f"{_own_prefix()}-{next(_NUMBERS)}-{name}"
        self.namespaces.append(namespace)
        run("ip", "netns", "add", namespace)
        run("ip", "-n", namespace, "link", "set", "lo", "up")
        return namespace

    def make_bridge(self, namespace: str) -> None:
        run("ip", "-n", namespace, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", namespace, "link", "set", "br0", "up")

    def plug(self, namespace: str, interface: str, switch: str) -> None:
        """A wire from an interface of one namespace to the bridge of another."""
        port = f"port{next(self._wires)}"
        run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", interface, "netns", namespace)
        run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
        run("ip", "-n", namespace, "link", "set", interface, "up")


class Host:
    """A machine with one interface."""

    def __init__(self, internet: Internet, namespace: str) -> None:
        self.internet = internet
        self.namespace = namespace
        self.address = ""
        """Its own, without the prefix length."""

    @property
    def public_address(self) -> str:
        """Under which others see it."""
        return self.address

    def set_address(self, address: str, *, gateway: str = "") -> None:
        """Gives it another address instead of the one it has. Connections that are open stay with the old one."""
        run("ip", "-n", self.namespace, "addr", "flush", "dev", "eth0", "scope", "global")
        run("ip", "-n", self.namespace, "addr", "add", address, "dev", "eth0")
        if gateway:
            run("ip", "-n", self.namespace, "route", "replace", "default", "via", gateway)
        self.address = address.partition("/")[0]

    def move(self) -> None:
        """Another public address, as after a reconnection of the line."""
        self.set_address(self.internet.new_address())

    def add_bridge(self, name: str, address: str) -> None:
        """One more interface, with an address that means something on this host only, as Docker makes it."""
        run("ip", "-n", self.namespace, "link", "add", name, "type", "bridge")
        run("ip", "-n", self.namespace, "addr", "add", address, "dev", name)
        run("ip", "-n", self.namespace, "link", "set", name, "up")

    @contextlib.contextmanager
    def black_hole(self) -> Iterator[None]:
        """Whatever arrives vanishes, and nobody is told: the cable is pulled behind the switch."""
        rule = ("INPUT", "-i", "eth0", "-j", "DROP")
        self.iptables("-I", *rule)
        try:
            yield
        finally:
            self.iptables("-D", *rule)

    def iptables(self, *arguments: str) -> None:
        iptables(self.namespace, *arguments)

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs these arguments here; the process keeps its id (ip-netns(8) calls exec)."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


class Router:
    """A NAT router, with hosts behind it."""

    def __init__(self, internet: Internet, namespace: str, ports: Ports, on_unsolicited: OnUnsolicited) -> None:
        self.internet = internet
        self.namespace = namespace
        self.address = ""
        self._hosts = itertools.count(10)
        run("ip", "-n", namespace, "addr", "add", "192.168.1.1/24", "dev", "br0")
        self.move()
        enter(namespace, lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))
        masquerade = ("POSTROUTING", "-o", "wan", "-j", "MASQUERADE")
        extra = ("--random-fully",) if ports is Ports.RANDOM else ()
        self.iptables("-t", "nat", "-A", *masquerade, *extra)
        reject = ("--reject-with", "tcp-reset") if on_unsolicited is OnUnsolicited.RESET else ()
        for chain in ("INPUT", "FORWARD"):
            self.iptables("-A", chain, "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED,DNAT", "-j", "ACCEPT")
            self.iptables("-A", chain, "-i", "wan", "-p", "tcp", "-j", on_unsolicited.value, *reject)
            self.iptables("-A", chain, "-i", "wan", "-j", "DROP")

    def host(self, name: str) -> Host:
        """A host behind this router."""
        host = HomeHost(self, self.internet.add_namespace(name))
        self.internet.plug(host.namespace, "eth0", self.namespace)
        host.set_address(f"192.168.1.{next(self._hosts)}/24", gateway="192.168.1.1")
        return host

    def move(self) -> None:
        """Another public address: what connections there were through the old one are cut without a word."""
        address = self.internet.new_address()
        run("ip", "-n", self.namespace, "addr", "flush", "dev", "wan", "scope", "global")
        run("ip", "-n", self.namespace, "addr", "add", address, "dev", "wan")
        self.address = address.partition("/")[0]

    def forward(self, port: int, host: Host) -> None:
        """Connections to this port of the router go to the host, as an owner sets it up."""
        self.iptables(
            "-t", "nat", "-A", "PREROUTING", "-i", "wan", "-p", "tcp", "--dport", str(port),
            "-j", "DNAT", "--to-destination", f"{host.address}:{port}",
        )  # fmt: skip

    @contextlib.contextmanager
    def upnp(self) -> Iterator[None]:
        """Maps ports for whoever asks over UPnP, as long as the context lasts."""
        command = self.command(sys.executable, "-m", "tests.nat.fake_igd", "192.168.1.1", self.address)
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as router:
            try:
                assert router.stdout is not None
                assert router.stdout.readline() == "ready\n", "the router's UPnP service does not start"
                yield
            finally:
                router.kill()

    def iptables(self, *arguments: str) -> None:
        iptables(self.namespace, *arguments)

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs these arguments on the router itself."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


class HomeHost(Host):
    """A host behind a router."""

    def __init__(self, router: Router, namespace: str) -> None:
        super().__init__(router.internet, namespace)
        self.router = router

    @property
    def public_address(self) -> str:
        return self.router.address

    def move(self) -> None:
        """The router's line gets another address; inside, nothing changes."""
        self.router.move()


def run(*command: str) -> None:
    """Runs a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def iptables(namespace: str, *arguments: str) -> None:
    run("ip", "netns", "exec", namespace, "iptables", "-w", *arguments)


def join_namespace(namespace: str) -> None:
    """Moves the calling process into a network namespace, as ``ip netns exec`` does: /sys shows its interfaces then.

    It must have one thread only (setns(2), unshare(2); Python's own functions for these are there from 3.12 on).
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")

    with (NETNS_FOLDER / namespace).open("rb") as opened:
        check(libc.setns(opened.fileno(), _CLONE_NEWNET))
    check(libc.unshare(_CLONE_NEWNS))
    check(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None))  # what is mounted here stays here
    check(libc.umount2(b"/sys", _MNT_DETACH))
    check(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))


def enter(namespace: str, work: Callable[[], object]) -> None:
    """Does something inside a namespace, in a child: this process stays where it is."""
    child = os.fork()
    if not child:
        status = 1
        try:
            join_namespace(namespace)
            work()
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"something failed inside {namespace}")


def remove_leftovers() -> None:
    """Removes what test runs that are gone have left behind, with the processes that still run in there."""
    found = sorted(path.name for path in NETNS_FOLDER.glob(f"{PREFIX}-*"))
    _remove([name for name in found if not _is_owner_alive(name)])


_NUMBERS = itertools.count()


def _own_prefix() -> str:
    me = psutil.Process()
    return f"{PREFIX}-{me.pid}-{int(me.create_time())}"


def _is_owner_alive(namespace: str) -> bool:
    _, pid, started, *_ = namespace.split("-")
    try:
        return int(psutil.Process(int(pid)).create_time()) == int(started)
    except (psutil.NoSuchProcess, ValueError):
        return False


def _remove(namespaces: Sequence[str]) -> None:
    deadline = time.monotonic() + _GONE_S
    for namespace in namespaces:
        # A namespace whose processes live on keeps its wires, without a name to find it by.
        while pids := _pids_in(namespace):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {pids} in {namespace} do not die")
            time.sleep(0.02)
    for namespace in namespaces:
        if (NETNS_FOLDER / namespace).exists():
            run("ip", "netns", "del", namespace)


def _pids_in(namespace: str) -> list[int]:
    """Processes that still run there; zombies have left it."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]
