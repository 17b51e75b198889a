from mqo.overlay.edits import Anchor, FileEdits


def test_an_anchor_without_versions_holds_in_every_release():
    assert Anchor("f(x)").applies_to("0.1")


def test_an_anchor_holds_in_the_releases_that_its_specifier_names():
    anchor = Anchor("f(x)", versions=">=0.14,<0.18")
    held = [v for v in ("0.13.1", "0.14.0", "0.17.1", "0.18.0") if anchor.applies_to(v)]
    assert held == ["0.14.0", "0.17.1"]


def test_a_release_candidate_counts_as_a_release():
    assert Anchor("f(x)", versions=">=0.14").applies_to("0.15.0rc1")


def test_a_file_belongs_to_the_package_of_its_first_two_folders():
    assert FileEdits("megatron/training/deep/file.py", ()).package == "megatron/training"
