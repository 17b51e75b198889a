from mqo.overlay.edits import FileEdits, covers


def test_no_range_holds_every_release():
    assert covers("", "0.1")


def test_a_range_holds_the_releases_that_its_specifier_names():
    held = [v for v in ("0.13.1", "0.14.0", "0.17.1", "0.18.0") if covers(">=0.14,<0.18", v)]
    assert held == ["0.14.0", "0.17.1"]


def test_a_release_candidate_counts_as_a_release():
    assert covers(">=0.14", "0.15.0rc1")


def test_a_file_belongs_to_the_package_of_its_first_two_folders():
    assert FileEdits("megatron/training/deep/file.py", ()).package == "megatron/training"
