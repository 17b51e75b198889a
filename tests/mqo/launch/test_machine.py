"""What the machine says of itself."""

from mqo.launch.machine import cpu_model


def test_the_processor_is_named_as_linux_names_it(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU 9000 @ 2 GHz\nflags\t: a b\n" * 2)
    assert cpu_model(cpuinfo) == "Some CPU 9000 @ 2 GHz"


def test_a_processor_without_a_name_has_none(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\n")
    assert cpu_model(tmp_path / "cpuinfo") is None
    assert cpu_model(tmp_path / "absent") is None
