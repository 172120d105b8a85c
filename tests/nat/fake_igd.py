"""A router's UPnP service, as much of it as port mapping needs: run on a router of tests/nat/internet.py.

UPnP Internet Gateway Device 1: the search over SSDP (UPnP Device Architecture 1.1, §1.3), a device description, and the
actions of WANIPConnection:1 that programs use to map a port. A mapping becomes a DNAT rule of this router's iptables.

    python -m tests.nat.fake_igd LAN-ADDRESS EXTERNAL-ADDRESS
"""

from __future__ import annotations

import re
import socket
import socketserver
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SSDP = ("239.255.255.250", 1900)
PORT = 5000
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"

DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major><minor>0</minor></specVersion>
<device><deviceType>{DEVICE}</deviceType><friendlyName>test router</friendlyName><manufacturer>tests</manufacturer>
<modelName>none</modelName><UDN>uuid:00000000-0000-0000-0000-000000000001</UDN><deviceList>
<device><deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><friendlyName>wan</friendlyName>
<manufacturer>tests</manufacturer><modelName>none</modelName>
<UDN>uuid:00000000-0000-0000-0000-000000000002</UDN><deviceList>
<device><deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><friendlyName>connection</friendlyName>
<manufacturer>tests</manufacturer><modelName>none</modelName>
<UDN>uuid:00000000-0000-0000-0000-000000000003</UDN><serviceList>
<service><serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<controlURL>/control</controlURL><eventSubURL>/events</eventSubURL><SCPDURL>/scpd.xml</SCPDURL></service>
</serviceList></device></deviceList></device></deviceList></device></root>"""

SCPD = """<?xml version="1.0"?>
<scpd xmlns="urn:schemas-upnp-org:service-1-0"><specVersion><major>1</major><minor>0</minor></specVersion>
<actionList/><serviceStateTable/></scpd>"""


class Control(BaseHTTPRequestHandler):
    """The device description, and the actions."""

    protocol_version = "HTTP/1.1"
    external_address = ""
    mappings: dict[tuple[str, str], tuple[str, str]] = {}  # noqa: RUF012  # one router per process

    def do_GET(self) -> None:
        self._answer(200, SCPD if self.path == "/scpd.xml" else DESCRIPTION)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        action = self.headers["SOAPAction"].strip('"').rpartition("#")[2]
        fields = dict(re.findall(r"<(New\w+)[^>]*>([^<]*)</\1>", body))
        print(action, fields, flush=True)
        match action:
            case "GetStatusInfo":
                self._done(action, NewConnectionStatus="Connected", NewLastConnectionError="ERROR_NONE", NewUptime="99")
            case "GetConnectionTypeInfo":
                self._done(action, NewConnectionType="IP_Routed", NewPossibleConnectionTypes="IP_Routed")
            case "GetExternalIPAddress":
                self._done(action, NewExternalIPAddress=self.external_address)
            case "AddPortMapping":
                self._map(fields)
                self._done(action)
            case "DeletePortMapping" if self._key(fields) in self.mappings:
                self._unmap(self._key(fields))
                self._done(action)
            case "GetSpecificPortMappingEntry" if self._key(fields) in self.mappings:
                client, port = self.mappings[self._key(fields)]
                self._done(
                    action, NewInternalPort=port, NewInternalClient=client, NewEnabled="1",
                    NewPortMappingDescription="fusion-node", NewLeaseDuration="3600",
                )  # fmt: skip
            case "DeletePortMapping" | "GetSpecificPortMappingEntry":
                self._fail(714, "NoSuchEntryInArray")
            case _:
                self._fail(401, "Invalid Action")

    @staticmethod
    def _key(fields: dict[str, str]) -> tuple[str, str]:
        return fields["NewProtocol"].lower(), fields["NewExternalPort"]

    def _map(self, fields: dict[str, str]) -> None:
        key = self._key(fields)
        if key in self.mappings:
            self._unmap(key)
        self.mappings[key] = (fields["NewInternalClient"], fields["NewInternalPort"])
        _dnat("-A", key, self.mappings[key])

    def _unmap(self, key: tuple[str, str]) -> None:
        _dnat("-D", key, self.mappings.pop(key))

    def _done(self, action: str, **values: str) -> None:
        inside = "".join(f"<{name}>{value}</{name}>" for name, value in values.items())
        self._answer(200, _envelope(f'<u:{action}Response xmlns:u="{SERVICE}">{inside}</u:{action}Response>'))

    def _fail(self, code: int, text: str) -> None:
        detail = (
            f'<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{code}</errorCode>'
            f"<errorDescription>{text}</errorDescription></UPnPError>"
        )
        self._answer(
            500,
            _envelope(
                f"<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring>"
                f"<detail>{detail}</detail></s:Fault>"
            ),
        )

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", 'text/xml; charset="utf-8"')
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


def _envelope(body: str) -> str:
    return (
        '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
        f's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>{body}</s:Body></s:Envelope>'
    )


def _dnat(change: str, key: tuple[str, str], target: tuple[str, str]) -> None:
    (protocol, port), (client, internal_port) = key, target
    subprocess.run(
        ["iptables", "-w", "-t", "nat", change, "PREROUTING", "-i", "wan", "-p", protocol, "--dport", port,
         "-j", "DNAT", "--to-destination", f"{client}:{internal_port}"],
        check=True,
    )  # fmt: skip


class Search(socketserver.BaseRequestHandler):
    """Answers those who look for a router."""

    def handle(self) -> None:
        data, reply = self.request
        text = data.decode(errors="replace")
        wanted = re.search(r"(?im)^ST: *(.+?)\r?$", text)
        if not text.startswith("M-SEARCH") or wanted is None:
            return
        if wanted[1] not in ("ssdp:all", "upnp:rootdevice", DEVICE):
            return
        kind = DEVICE if wanted[1] == "ssdp:all" else wanted[1]
        reply.sendto(
            f"HTTP/1.1 200 OK\r\nCACHE-CONTROL: max-age=120\r\nST: {kind}\r\n"
            f"USN: uuid:00000000-0000-0000-0000-000000000001::{kind}\r\nEXT:\r\nSERVER: test UPnP/1.0 test/1\r\n"
            f"LOCATION: http://{sys.argv[1]}:{PORT}/root.xml\r\n\r\n".encode(),
            self.client_address,
        )


class _SsdpServer(socketserver.UDPServer):
    allow_reuse_address = True


def main(lan_address: str, external_address: str) -> None:
    Control.external_address = external_address
    search = _SsdpServer((SSDP[0], SSDP[1]), Search)
    membership = struct.pack("4s4s", socket.inet_aton(SSDP[0]), socket.inet_aton(lan_address))
    search.socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    control = ThreadingHTTPServer((lan_address, PORT), Control)
    threading.Thread(target=control.serve_forever, daemon=True).start()
    print("ready", flush=True)
    search.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
