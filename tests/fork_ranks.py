"""In torchrun's place: `fork_ranks.py SOCKET N PROGRAM ...` forks the N ranks of one program.

It ends with 1, and ends the others, when one rank does not end well.
"""

import os
import select
import signal
import socket
import sys
from types import SimpleNamespace

import forking
from mqo import process


def main(path, count, *program):
    """Start all, wait for all, and leave none."""
    forking.server = lambda: SimpleNamespace(socket=path)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    where |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    ranks = []
    with process.stops_raise():
        try:
            for rank in map(str, range(int(count))):
                env = os.environ | where | {"RANK": rank, "LOCAL_RANK": rank}
                ranks.append(forking.forked([sys.executable, "-u", *program], env=env))
            left = {rank.server: rank for rank in ranks}
            while left:
                for ended in select.select(list(left), [], [])[0]:
                    if left.pop(ended).wait() != 0:
                        sys.exit(1)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    process.end(rank)


if __name__ == "__main__":
    signal.signal(process.SAVE, signal.SIG_IGN)
    main(*sys.argv[1:])
