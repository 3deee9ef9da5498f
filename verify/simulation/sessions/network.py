"""The simulated network: how engines meet, and how their connections break."""

from __future__ import annotations

from .engine import End, EngineState, Link
from .process import Process
from .world import World


class Network:
    """The links between engines. Only the messages of one direction keep their order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.links: list[Link] = []
        self.hosts: dict[str, Process] = {}
        """The listeners, by address."""
        self.engines: dict[Process, EngineState] = {}

    def live_links(self) -> list[Link]:
        self.links = [link for link in self.links if link.alive]
        return self.links

    # --- meeting

    def dial(self, dialer: EngineState, address: str, ident: int, timeout: float) -> None:
        """Connects to an engine. A completion "connect" follows, with the known peer of that engine
        or a new one."""
        host, engine_id = address.removeprefix("kvx://").split("/")
        for end in dialer.ends.values():
            if end.other.native.engine_id == engine_id:
                if end.state == "up":
                    dialer.complete("connect", ident, end.peer_id)
                else:
                    self._wait(end, ident, timeout)
                return
        self.world.clock.after(
            self.world.latency(), lambda: self._hello(dialer, host, engine_id, ident, timeout)
        )

    def _hello(
        self, dialer: EngineState, host: str, engine_id: str, ident: int, timeout: float
    ) -> None:
        """Opens a connection at a host, which may have no listener."""
        listener = self.hosts.get(host)
        refusal = None
        if listener is None or not listener.ready:
            refusal = "connect-failed", f"nothing listens at {host}"
        elif listener.incarnation != engine_id:
            self.world.count("restarted peer refused")
            refusal = "peer-restarted", f"another engine answers at {host}"
        if refusal is not None or listener is None:
            code, text = refusal or ("connect-failed", "")
            answer = lambda: dialer.complete("connect", ident, code=code, text=text)  # noqa: E731
            silent = listener is not None and listener.silent
            self.world.clock.after(
                timeout if silent else self.world.latency(), answer, dialer.process
            )
            return
        if not dialer.process.alive:
            return
        link = Link(self.world, dialer, self.engines[listener])
        self.links.append(link)
        ours, theirs = link.ends
        self._wait(ours, ident, timeout)
        self.world.clock.after(timeout, lambda: self._late(ours), dialer.process)

        def ready() -> None:
            if ours.state == "opening":
                ours.come_up()

        def announced() -> None:
            if theirs.state == "opening":
                theirs.come_up()
                link.carry(1, ready, ordered=True)

        # The reply goes back; then the dialer announces the paths that it has opened.
        link.carry(1, lambda: link.carry(0, announced, ordered=True), ordered=True)

    def _wait(self, end: End, ident: int, timeout: float) -> None:
        end.waiters.append(ident)

        def expire() -> None:
            if ident in end.waiters:
                end.waiters.remove(ident)
                end.native.complete(
                    "connect", ident, code="connect-failed", text="no answer in time"
                )

        self.world.clock.after(timeout, expire, end.native.process)

    def _late(self, end: End) -> None:
        if end.state == "opening":
            end.lose("connect-failed", "no answer in time")

    # --- breaking

    def reset(self, link: Link) -> None:
        """Resets a connection. Both sides learn of it at about the same time."""
        for end in link.ends:
            self.world.clock.after(
                self.world.latency(),
                lambda end=end: end.lose("peer-lost", "connection reset"),  # type: ignore[misc]
                end.native.process,
            )

    def half_open(self, link: Link, index: int) -> None:
        """Tells one side that the connection is lost. The other side only gets no more data."""
        link.cut(index)
        link.ends[index].lose("peer-lost", "connection reset")

    def cut(self, link: Link, index: int | None) -> None:
        """Cuts a connection in one direction, or in both for None."""
        for direction in (0, 1) if index is None else (index,):
            link.cut(direction)

    def killed(self, process: Process, silently: bool) -> None:
        """Ends the connections of a killed process. With `silently` its host has died too, so its
        peers only get no more data."""
        for end in list(self.engines[process].ends.values()):
            if silently:
                end.other.watch()
                continue
            end.link.carry(
                end.index,
                lambda other=end.other: other.lose("peer-lost", "it exited"),  # type: ignore[misc]
                ordered=self.world.rng.random() < 0.5,
            )

    def stopped(self, process: Process) -> None:
        """Makes the peers of a stopped process watch it: its heartbeats have ended."""
        for end in self.engines[process].ends.values():
            end.other.watch()

    def woken(self, process: Process) -> None:
        """Makes a process that was stopped watch its peers anew: their silence meanwhile does not
        count."""
        for end in self.engines[process].ends.values():
            end.watch()

    def bury(self, process: Process) -> None:
        """Ends the connections of a dead process, without a message to its peers."""
        for end in list(self.engines[process].ends.values()):
            end.lose("engine-closed", "it is dead")
