"""The wires between process 0 and each other one: they meet over them, and notice who is gone.

A device that waits for a lost peer waits for ever, and JAX's own service says who is lost late and
with a stack trace. So each process keeps a connection of its own with process 0, which tells the
others: a process that dies closes it at once, and one that is stuck falls silent.
"""

import contextlib
import dataclasses
import json
import os
import selectors
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

Message = dict[str, Any]

# A process that fails says so; the others may be about to fail alike, with a reason of their own.
GRACE = 2.0
# Seconds for an answer: when their time is over, process 0 knows who is missing.
ANSWER = 5.0


class HostsError(RuntimeError):
    """The processes of a run do not find each other."""


@dataclasses.dataclass
class Peer:
    """The process at the other end of a wire."""

    wire: socket.socket
    name: str  # process, pid and host
    step: int = 0  # steps it had taken when it was heard last
    heard: float = dataclasses.field(default_factory=time.monotonic)
    unread: bytes = b""

    def __str__(self) -> str:
        return f"{self.name}, step {self.step})"

    def send(self, message: Message) -> None:
        """Send a message; a peer that is gone is noticed where it is listened to."""
        try:
            self.wire.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def receive(self) -> list[Message] | None:
        """The messages that have come; None: the other end is closed."""
        try:
            data = self.wire.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        *lines, self.unread = (self.unread + data).split(b"\n")
        self.heard = time.monotonic()
        return [json.loads(line) for line in lines] if data else None

    def wait(self, deadline: float) -> Message | None:
        """The next message; None: the other end is closed, or the time is over."""
        while (left := deadline - time.monotonic()) > 0:
            self.wire.settimeout(left)
            messages = self.receive()
            if messages is None:
                return None
            if messages:
                return messages[0]
        return None


class Watch:
    """Ends this process when one of its peers is gone; a thread.

    Args:
      peers: of process 0 all others, of these process 0.
      seconds: without a message of a peer until it is taken for lost.
      end: is called with the reason; instead of it, ends the process with exit code 1.
    """

    def __init__(
        self, peers: list[Peer], seconds: float, end: Callable[[str], None] | None = None
    ) -> None:
        self._met = peers
        self._peers = list(peers)
        self._seconds = seconds
        self._end = end or end_process
        self._step = 0
        self._failure: tuple[float, str] | None = None  # of a peer: when to end for it, and why
        self._selector = selectors.DefaultSelector()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self, step: int) -> None:
        """Note how far this process is."""
        self._step = step

    @property
    def is_ending(self) -> bool:
        """Whether a peer has failed, and this process is about to end."""
        return self._failure is not None

    def stop(self, failure: str | None = None) -> None:
        """Stop watching, and tell the peers that this process ends well, or why it fails."""
        self._stopped.set()
        self._thread.join()
        for peer in self._peers:
            peer.send({"ended": failure, "step": self._step})
        self._selector.close()
        for peer in self._met:
            peer.wire.close()

    def _run(self) -> None:
        interval = min(1.0, self._seconds / 4)
        for peer in self._peers:
            peer.wire.settimeout(interval)
            peer.heard = time.monotonic()
            self._selector.register(peer.wire, selectors.EVENT_READ, peer)
        while not self._stopped.wait(interval / 4):
            for peer in self._peers:
                peer.send({"step": self._step})
            for key, _ in self._selector.select(interval / 2):
                self._listen(key.data)
            now = time.monotonic()
            for peer in self._peers:
                if now - peer.heard > self._seconds:
                    self._lose(
                        f"{peer} gave no sign for {self._seconds:g} s: it is stuck, or its host "
                        "is gone"
                    )
            if self._failure is not None and now > self._failure[0]:
                self._lose(self._failure[1])

    def _listen(self, peer: Peer) -> None:
        messages = peer.receive()
        if messages is None:
            self._lose(f"{peer} died")
            return
        for message in messages:
            peer.step = message.get("step", peer.step)
            if "lost" in message:
                self._lose(message["lost"])
            elif "ended" in message:
                self._peers.remove(peer)
                self._selector.unregister(peer.wire)
                if message["ended"] is not None:
                    reason = f"{peer} failed: {message['ended']}"
                    self._failure = (time.monotonic() + GRACE, reason)
                return

    def _lose(self, reason: str) -> None:
        for peer in self._peers:
            peer.send({"lost": reason})
        self._stopped.set()
        self._end(reason)


def end_process(reason: str) -> NoReturn:
    """Print the reason and end with exit code 1, whatever the other threads wait for."""
    print(
        f"error: {reason}; the same command continues from the newest checkpoint",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def meet(coordinator: str, processes: int, process: int, timeout: float) -> tuple[list[Peer], str]:
    """Meet the other processes at the address of process 0.

    Returns:
      The peers to watch, and the address for JAX's own service to meet at.

    Raises:
      HostsError: they did not all come in time, or came with other numbers.
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise HostsError(f"--coordinator={coordinator} must be HOST:PORT of process 0")
    deadline = time.monotonic() + timeout
    hello = {
        "processes": processes,
        "process": process,
        "name": f"process {process} (pid {os.getpid()} on {socket.gethostname()}",
    }
    with contextlib.ExitStack() as opened:
        if process == 0:
            peers = _gather(coordinator, int(port), hello, deadline, opened)
            with socket.create_server(("", 0)) as free:
                service = free.getsockname()[1]
            for peer in peers:
                peer.send({"service": service, "name": hello["name"]})
            opened.pop_all()
            return peers, f"127.0.0.1:{service}"
        host = host.strip("[]")
        peer = Peer(_reach(coordinator, host, int(port), deadline, opened), "process 0")
        peer.send(hello)
        answer = peer.wait(deadline + ANSWER)
        if answer is None or "refused" in answer:
            raise HostsError(
                answer["refused"]
                if answer
                else f"process 0 at --coordinator={coordinator} did not let this one begin within "
                f"{timeout:g} s; it ended, or waits for others, or is another program"
            )
        peer.name = answer["name"]
        opened.pop_all()
        return [peer], _relay((host, answer["service"]))


def _gather(
    coordinator: str, port: int, hello: Message, deadline: float, opened: contextlib.ExitStack
) -> list[Peer]:
    processes = hello["processes"]
    found: dict[int, Peer] = {}
    with _listening(coordinator, port) as server:
        while missing := sorted(set(range(1, processes)) - found.keys()):
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                peer = Peer(opened.enter_context(server.accept()[0]), "?")
            except TimeoutError as error:
                reason = (
                    f"process {', '.join(map(str, missing))} of {processes} did not come to "
                    f"--coordinator={coordinator} in time; see that it runs, and that its "
                    "--coordinator is the same"
                )
                _refuse(found.values(), reason)
                raise HostsError(reason) from error
            theirs = _greeting(peer, deadline)
            if theirs is None:
                peer.wire.close()  # not one of ours
                continue
            peer.name = theirs["name"]
            if theirs["processes"] != processes:
                reason = (
                    f"{peer.name}) came with --processes={theirs['processes']}, and process 0 has "
                    f"--processes={processes}; write the same everywhere"
                )
            elif theirs["process"] not in missing:
                reason = f"--process={theirs['process']} came twice, from {peer.name}) too"
            else:
                found[theirs["process"]] = peer
                continue
            _refuse([*found.values(), peer], reason)
            raise HostsError(reason)
    return [found[process] for process in sorted(found)]


def _listening(coordinator: str, port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise HostsError(
            f"process 0 cannot listen at --coordinator={coordinator} ({error.strerror}); write "
            "another port"
        ) from error


def _greeting(peer: Peer, deadline: float) -> Message | None:
    try:
        theirs = peer.wait(min(deadline, time.monotonic() + ANSWER))
    except ValueError:  # no JSON
        return None
    return theirs if isinstance(theirs, dict) and "processes" in theirs else None


def _refuse(peers: Iterable[Peer], reason: str) -> None:
    for peer in peers:
        peer.send({"refused": reason})


def _reach(
    coordinator: str, host: str, port: int, deadline: float, opened: contextlib.ExitStack
) -> socket.socket:
    while True:
        left = deadline - time.monotonic()
        try:
            wire = socket.create_connection((host, port), timeout=max(left, 0.1))
            return opened.enter_context(wire)
        except OSError as error:
            if left <= 0.2:
                raise HostsError(
                    f"nobody answers at --coordinator={coordinator} ({error}); write the "
                    "HOST:PORT of process 0, and see that it runs"
                ) from error
            time.sleep(0.2)


class _Relay(socketserver.BaseRequestHandler):
    """Passes on what JAX's client says to its service, and never that the service is gone.

    At the end of the service, the client would abort this process with a stack trace, before
    anyone could say what happened.
    """

    upstream: tuple[str, int]

    def handle(self) -> None:
        service = self._reach()
        threading.Thread(target=self._answer, args=(service,), daemon=True).start()
        with service, contextlib.suppress(OSError):
            while data := self.request.recv(1 << 16):
                with contextlib.suppress(OSError):
                    service.sendall(data)

    def _reach(self) -> socket.socket:
        while True:
            try:
                return socket.create_connection(self.upstream)
            except OSError:  # the service does not listen yet
                time.sleep(0.1)

    def _answer(self, service: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := service.recv(1 << 16):
                self.request.sendall(data)


def _relay(upstream: tuple[str, int]) -> str:
    handler = type("Relay", (_Relay,), {"upstream": upstream})
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"127.0.0.1:{server.server_address[1]}"
