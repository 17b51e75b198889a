"""What may be in the place of a file that somebody else made: it never ends, or is none."""

import os


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def circle(path):
    path.symlink_to(path)


ODD = (pipe, device, circle)
