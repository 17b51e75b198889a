"""What the machine says of itself."""

import ctypes
from types import SimpleNamespace

import pytest
from mqo.errors import UnknownNameError
from mqo.launch import machine
from mqo.launch.machine import Machine, cpu_model, devices_of, imagined
from mqo.scale.devices import GIB


def test_the_processor_is_named_as_linux_names_it(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU 9000 @ 2 GHz\nflags\t: a b\n" * 2)
    assert cpu_model(cpuinfo) == "Some CPU 9000 @ 2 GHz"


def test_a_processor_without_a_name_has_none(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\n")
    assert cpu_model(tmp_path / "cpuinfo") is None
    assert cpu_model(tmp_path / "absent") is None


def driver(*devices, error=0):
    """libcuda, as far as devices are asked for: (name, bytes) each."""

    def fill(index):
        return lambda target, device: setattr(target, "value", devices[device.value - 10][index])

    return SimpleNamespace(
        cuInit=lambda flags: error,
        cuDeviceGetCount=lambda count: setattr(count._obj, "value", len(devices)) or 0,
        cuDeviceGet=lambda device, number: setattr(device._obj, "value", 10 + number),
        cuDeviceTotalMem_v2=lambda memory, device: fill(1)(memory._obj, device),
        cuDeviceGetName=lambda name, size, device: fill(0)(name, device),
    )


SMALL, LARGE = (b"NVIDIA H100 80GB HBM3", 79 * GIB), (b"NVIDIA H200", 139 * GIB)


def test_devices_are_told_with_their_memory():
    assert devices_of(driver(LARGE, SMALL)) == [
        (139 * GIB, "NVIDIA H200"),
        (79 * GIB, "NVIDIA H100 80GB HBM3"),
    ]
    assert devices_of(driver()) == []
    assert devices_of(driver(LARGE, error=100)) == []


@pytest.fixture
def with_driver(monkeypatch):
    def use(*devices):
        monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver(*devices))

    return use


def test_the_smallest_device_is_the_machines(with_driver):
    with_driver(LARGE, SMALL)
    found = machine.detect()
    assert (found.gpus, found.device, found.memory) == (2, "NVIDIA H100 80GB HBM3", 79 * GIB)
    assert found.has_cuda


def test_a_machine_without_devices_has_none(with_driver):
    with_driver()
    assert machine.detect() == Machine(machine.detect().cores, 0)


def test_a_machine_can_be_imagined():
    found = imagined("h100-80gb", 8)
    assert (found.gpus, found.device) == (8, "h100-80gb")
    assert 79 * GIB < found.memory < 80 * GIB
    with pytest.raises(UnknownNameError, match=r"a100-40gb.*h200"):
        imagined("v100", 8)


@pytest.mark.parametrize(
    ("text", "there"), [(None, False), ("import nothing_like_it\n", False), ("x = 1\n", True)]
)
def test_a_module_counts_where_it_imports(text, there, tmp_path, monkeypatch):
    name = f"mqo_test_of_imports_{there}_{text is None}"
    if text:
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert machine._imports(name) == there
