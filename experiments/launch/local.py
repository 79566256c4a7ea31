"""Start several processes of a run on this machine, and take them down together.

Run: python experiments/launch/local.py --processes=2 --devices=4 -- \
         --config=configs/quickstart.py --workdir=runs/local

What follows -- goes to `python -m jaxdec`, or to another module by --module. When a process fails,
those that do not end by themselves get SIGTERM and, --grace seconds later, SIGKILL; its exit code
is the launcher's. SIGINT and SIGTERM go to all: they save one step together, and the code is 75.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time

# Seconds in which the others of a failed process find out, say so, and end by themselves.
PATIENCE = 4.0


class Launcher:
    """The processes of one run, as children of this one."""

    def __init__(self, command: list[str], processes: int, devices: int, grace: float):
        self._grace = grace
        self._lock = threading.Lock()
        self._children: list[subprocess.Popen] = []
        self._stops = False
        # Before there are children: one that this process left behind would run for ever.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONUNBUFFERED": "1"}
        self._children += [
            subprocess.Popen(
                [
                    *command,
                    f"--coordinator={address}",
                    f"--processes={processes}",
                    f"--process={i}",
                ],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # a terminal's Ctrl-C comes through this process, once
            )
            for i in range(processes)
        ]
        self._readers = [
            threading.Thread(target=self._copy, args=(i, source, target))
            for i, child in enumerate(self._children)
            for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr))
        ]
        for reader in self._readers:
            reader.start()
        if self._stops:
            self.stop()

    def stop(self) -> None:
        """Send SIGTERM to all; to those that are not started yet, once they are."""
        self._stops = True
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Send a signal to those that still run."""
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)

    def wait(self) -> int:
        """Wait for all; the exit code of the first that failed, or 0."""
        first, asks, kills = 0, None, None
        while any(child.poll() is None for child in self._children):
            failed = [child.returncode for child in self._children if child.poll()]
            now = time.monotonic()
            if failed and not first:
                first, asks = failed[0], now + PATIENCE
            elif asks is not None and now > asks:
                asks, kills = None, now + self._grace
                self.signal(signal.SIGTERM)
            elif kills is not None and now > kills:
                self.signal(signal.SIGKILL)
            time.sleep(0.05)
        for reader in self._readers:
            reader.join()
        first = first or next((child.returncode for child in self._children if child.poll()), 0)
        return first if first >= 0 else 128 - first

    def _copy(self, process: int, source, target) -> None:
        for line in source:
            with self._lock:
                target.write(f"[{process}] {line}")
                target.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--devices", type=int, default=1, help="CPU devices of each process")
    parser.add_argument("--module", default="jaxdec", help="what to run, as python -m takes it")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("arguments", nargs="*", help="after --, what the module is given")
    given = parser.parse_args()
    if given.processes < 1 or given.devices < 1:
        parser.error("--processes and --devices must be at least 1")
    command = [sys.executable, "-m", given.module, *given.arguments]
    sys.exit(Launcher(command, given.processes, given.devices, given.grace).wait())


if __name__ == "__main__":
    main()
