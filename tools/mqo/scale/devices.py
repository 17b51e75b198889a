"""The memory of some GPUs, for plans of machines that are not there."""

from mqo.matrix.tables import check_choice

GIB = 1 << 30
# GiB that the driver reports: the "total capacity" of torch's out-of-memory errors, the least of
# those found in public logs (H100 79.1 to 79.3, A100 79.1 to 79.3, H200 139.7 to 139.8, B200
# 178.3), and for the A100 of 40 GB deviceQuery's 42,298,834,944 bytes (bottlerocket#3873).
DEVICES = {
    "a100-40gb": 39.3,
    "a100-80gb": 79.1,
    "h100-80gb": 79.1,
    "h200": 139.7,
    "b200": 178.3,
}


def memory_of(device: str) -> int:
    """Return the bytes of a device; UnknownNameError lists the valid names."""
    check_choice("device", device, DEVICES)
    return int(DEVICES[device] * GIB)


def usable(memory: int) -> int:
    """Return the bytes that a plan may use: less a tenth, which the allocator cannot."""
    return memory * 9 // 10
