"""Any sequence of commands, quant types and hand edits: what holds at every moment of it."""

import shutil
import stat
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mqo.errors import EditedError, OverlayError
from mqo.overlay import literals, transaction
from mqo.overlay.apply import AlreadyApplied, apply, restore

from ..conftest import FILES, contents, make_mini

LAYERS, PLAIN = "megatron/core/layers.py", "megatron/core/plain.py"
TOUCHED = (LAYERS, "megatron/core/gadget.py", "megatron/training/loop.py")
NAMES = st.lists(st.sampled_from(["ours", "quant_sites", "new_engine"]), unique=True)
TYPES = st.sampled_from(["mxfp8", "mxfp4", "hifp8", "none"])
# What a hand may do to a file; None deletes it.
EDITS = st.sampled_from([b"", b"# mine\r\n", b"x = 1", b"def f(:\n", b"\xff\x00", None])


class Sequences(RuleBasedStateMachine):
    """A small tree; which entries are applied, and which files hold what by hand."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.mini = make_mini(self.folder)
        self.applied, self.edited, self.known = frozenset(), {}, {}

    def teardown(self):
        shutil.rmtree(self.folder)

    @initialize(modes=st.tuples(*[st.sampled_from([0o644, 0o755, 0o600, 0o640])] * 3))
    def set_modes(self, modes):
        for path, mode in zip(TOUCHED, modes, strict=True):
            (self.mini.tree.root / path).chmod(mode)
        self.pristine = contents(self.mini.tree.root / "megatron")

    # -- what a user does ----------------------------------------------------------------------

    @rule(names=NAMES, force=st.booleans())
    def apply(self, names, force):
        if self.run(apply, names, force):
            asked = self.mini.series.with_required(names or self.mini.series.names)
            self.applied = frozenset(asked) | (self.applied if names else frozenset())
            before = contents(self.mini.tree.root)
            assert isinstance(apply(self.mini.tree, self.mini.series, names), AlreadyApplied)
            assert contents(self.mini.tree.root) == before

    @rule(names=NAMES, force=st.booleans())
    def restore(self, names, force):
        gone = self.applied.intersection(names or self.applied)
        if "ours" in gone and "quant_sites" in self.applied - gone:
            self.refused(restore, names, force)
        elif self.run(restore, names, force):
            self.applied -= gone

    @precondition(lambda self: "quant_sites" in self.applied and LAYERS not in self.edited)
    @rule(fprop=TYPES, dgrad=TYPES)
    def set_types(self, fprop, dgrad):
        path = self.mini.path("core/layers.py")
        path.write_bytes(literals.write(path.read_bytes(), {"fprop": fprop, "dgrad": dgrad}))

    @rule(path=st.sampled_from([*TOUCHED, PLAIN]), text=EDITS, whole=st.booleans())
    def edit(self, path, text, whole):
        file = self.mini.tree.root / path
        if text is None:
            self.edited[path] = None
            file.unlink(missing_ok=True)
        elif file.exists():
            self.edited[path] = text if whole else file.read_bytes() + b"\n# \n" + text
            file.write_bytes(self.edited[path])

    @rule(path=st.sampled_from(TOUCHED))
    def undo_an_edit(self, path):
        if path in self.edited and not self.applied:
            self.put_back(path)

    # -- what then holds -----------------------------------------------------------------------

    def run(self, command, names, force):
        """Whether the command was carried out; what it did to hand edits is checked."""
        before, types = contents(self.mini.tree.root), self.types()
        manifest = self.mini.tree.manifest()
        try:
            outcome = command(self.mini.tree, self.mini.series, names, force=force)
        except EditedError as error:
            assert not force
            assert any(path in str(error) for path in self.edited)
            assert contents(self.mini.tree.root) == before
            return False
        copies = getattr(outcome, "kept", ())  # .mqo/kept/TIME/PATH
        kept = {"/".join(copy.split("/")[3:]): self.mini.tree.read(copy) for copy in copies}
        for path, content in list(self.edited.items()):
            if self.mini.tree.read(path) != content:
                assert force
                assert kept.pop(path, None) == content
                if content is None and not (manifest and path in manifest.files):
                    self.forget_mode(path)
                del self.edited[path]
        assert kept == {}
        if types and LAYERS not in self.edited and self.types():
            assert self.types() == types
        return True

    def refused(self, command, names, force):
        before = contents(self.mini.tree.root)
        try:
            command(self.mini.tree, self.mini.series, names, force=force)
        except OverlayError:
            assert contents(self.mini.tree.root) == before
        else:
            raise AssertionError("an entry went that another one requires")

    def types(self):
        """The quant types, where they are in force."""
        if "quant_sites" not in self.applied or LAYERS in self.edited:
            return {}
        return {site.site: site.value for site in literals.read(self.mini.tree.read(LAYERS))}

    @invariant()
    def hand_edits_are_as_they_were_left(self):
        for path, content in self.edited.items():
            assert self.mini.tree.read(path) == content

    @invariant()
    def the_manifest_and_the_files_agree(self):
        tree = self.mini.tree
        manifest = tree.manifest()
        assert frozenset(manifest.names if manifest else ()) == self.applied
        assert tree.edited_files() == sorted(self.edited)
        patched = manifest.files if manifest else {}
        for path, file in patched.items():
            for digest in (file.pristine, *(digest for _, digest in file.stages)):
                tree.object(digest)
            assert path in self.edited or tree.state_of(path, file) == "patched"
        for path, content in FILES.items():
            assert path in self.edited or path in patched or tree.read(path) == content

    @invariant()
    def the_same_entries_give_the_same_bytes(self):
        for path in set(TOUCHED) - self.edited.keys():
            key = self.applied - {"ours"}, path
            content = literals.neutral(self.mini.tree.read(path))
            assert self.known.setdefault(key, content) == content

    @invariant()
    def nothing_else_lies_in_the_tree(self):
        found = contents(self.mini.tree.root)
        files = {path for path, row in found.items() if row[0] is not None}
        inside = {path for path in files if path.startswith(".mqo/")}
        gone = {path for path, content in self.edited.items() if content is None}
        assert files - inside == {*FILES, "megatron/ours.py"} - gone
        upstream = self.mini.tree.upstream().files.values()
        manifest = self.mini.tree.manifest()
        used = {*upstream, *(manifest.objects if manifest else ())}
        records = {f".mqo/objects/{digest}" for digest in used} | {".mqo/upstream.json"}
        records |= {".mqo/manifest.json"} if manifest else set()
        assert {path for path in inside if not path.startswith(".mqo/kept/")} == records
        assert not transaction.is_interrupted(self.mini.tree.root)

    def forget_mode(self, path):
        """A file that was deleted before it was ever patched has left its mode nowhere."""
        name = path.removeprefix("megatron/")
        self.pristine[name] = (self.pristine[name][0], stat.S_IFREG | transaction.DEFAULT_MODE)

    def put_back(self, path):
        """Undo an edit by hand, the mode included."""
        content, mode = self.pristine[path.removeprefix("megatron/")]
        (self.mini.tree.root / path).write_bytes(content)
        (self.mini.tree.root / path).chmod(mode & 0o7777)
        self.edited.pop(path, None)

    @rule()
    def restoring_everything_gives_upstreams_bytes_and_modes(self):
        if self.run(restore, (), True):
            self.applied = frozenset()
        for path in list(self.edited):
            self.put_back(path)
        assert contents(self.mini.tree.root / "megatron") == self.pristine


Sequences.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSequences = Sequences.TestCase
