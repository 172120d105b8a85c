"""The thread's event loop: one host under trio, from start to stop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import multiaddr
import trio
from libp2p.tools.anyio_service import background_trio_service

from fusion_node.errors import AddressInUse
from p2p.control import HostConfig, HostHooks
from p2p.libp2p_adapter.connections import close_quietly
from p2p.libp2p_adapter.gossip import running_gossip
from p2p.libp2p_adapter.hardening import MAX_CONNECTIONS, make_host
from p2p.libp2p_adapter.inbound import Inbound
from p2p.libp2p_adapter.kademlia import make_dht
from p2p.libp2p_adapter.multiaddrs import tcp
from p2p.libp2p_adapter.node import Connections, Libp2pNode
from p2p.libp2p_adapter.reached import take_nonces


class Libp2pRunner:
    """Runs one host under trio until stopped. See p2p.bridge.Runner."""

    def __init__(self, config: HostConfig, hooks: HostHooks) -> None:
        self._config = config
        self._hooks = hooks
        self._token: trio.lowlevel.TrioToken | None = None
        self._calls: trio.Nursery | None = None
        self._stop = trio.Event()
        self._node: Libp2pNode | None = None

    @property
    def node(self) -> Libp2pNode:
        if self._node is None:
            raise RuntimeError("the host is not running")
        return self._node

    def run(self, on_ready: Callable[[], None]) -> None:
        trio.run(self._main, on_ready)

    def stop(self) -> None:
        if self._token is not None:
            try:
                self._token.run_sync_soon(self._stop.set)
            except trio.RunFinishedError:
                return

    def submit(
        self, call: Callable[[], Awaitable[Any]], on_done: Callable[[Any, BaseException | None], None]
    ) -> Callable[[], None]:
        if self._token is None or self._calls is None:
            raise RuntimeError("the host is not running")
        token, calls, scope = self._token, self._calls, trio.CancelScope()

        async def body() -> None:
            with scope:
                try:
                    result = await call()
                except Exception as error:  # noqa: BLE001  # it is the caller's, on the other side of the bridge
                    on_done(None, error)
                except BaseException as error:
                    on_done(None, error)
                    raise
                else:
                    on_done(result, None)

        def cancel() -> None:
            try:
                token.run_sync_soon(scope.cancel)
            except trio.RunFinishedError:
                return

        token.run_sync_soon(lambda: calls.start_soon(body))
        return cancel

    async def _main(self, on_ready: Callable[[], None]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with _running_node(self._config, self._hooks) as self._node, trio.open_nursery() as self._calls:
            on_ready()
            await self._stop.wait()
            self._calls.cancel_scope.cancel()


@asynccontextmanager
async def _running_node(config: HostConfig, hooks: HostHooks) -> AsyncIterator[Libp2pNode]:
    listen = [multiaddr.Multiaddr(tcp(host, port)) for host, port in config.listen]
    host = make_host(config, listen)
    connections = Connections(hooks.on_connection, hooks.on_path, hooks.gate)
    Inbound(host, hooks.gate, max_connections=MAX_CONNECTIONS)
    host.get_network().register_notifee(connections)
    take_nonces(host, hooks.on_reached)
    async with host.run(listen):
        if len(host.get_network().listeners) != len(listen):  # it only logs what it could not bind
            raise AddressInUse("an address to listen on was taken by another program just now: try again")
        dht = make_dht(host, hooks.sequence_of, hooks.gate, serve=config.serve)
        async with background_trio_service(dht), trio.open_nursery() as tasks:
            try:
                node = Libp2pNode(host, dht, config, hooks, tasks)
                connections.on_gone = node.connection_gone
                connections.on_direct = node.became_direct
                connections.on_refused = lambda connection: tasks.start_soon(close_quietly, connection)
                if config.gossip:
                    async with running_gossip(host, hooks.on_gossip) as node.topic:
                        yield node
                else:
                    yield node
            finally:
                tasks.cancel_scope.cancel()
                # It leaves connections to the garbage collector, and the peers in doubt.
                with trio.CancelScope(deadline=trio.current_time() + 1.0, shield=True):
                    async with trio.open_nursery() as nursery:
                        for their_id in host.get_connected_peers():
                            nursery.start_soon(host.disconnect, their_id)
