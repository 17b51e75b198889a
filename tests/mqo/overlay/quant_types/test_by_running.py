"""Random functions, read and run: what is said of a literal is what changes with it.

A function is run on symbols with each value of each literal. The products in what it returns tell
which sites depend on the literal. A site that may be set must name all the literals that it depends
on, and all the sites that depend on them. To refuse is never wrong, so enough must be accepted.
"""

import itertools
import random
import textwrap

import pytest
from mqo.overlay.literals import VARIABLE
from mqo.overlay.quant_types import sites

from .lookalike import ATTENTION, attention

FLAGS = ("f0", "f1")
VALUES = "abcd"

# Statements of a function; T is the variable, `?` the value of a literal.
SCORES = (
    "s = mm(query, key)",
    "s = mm(q, k)",
    "s = typed_mm(query, key, T)",
    "s = product(q, k, T)",
    "s = a_mm(q, key).to() if T == 'a' else mm(q, key)",
    "if T == 'a':\n    s = a_mm(query, key)\nelse:\n    s = mm(query, key)",
)
CONTEXT = (
    "c = mm(p, value)",
    "c = mm(softmax(s), value)",
    "c = typed_mm(p, value, T)",
    "c = product(softmax(s), value, T)",
    "if T == 'a':\n    c = a_mm(p, value).to()\nelse:\n    c = mm(p, value)",
    "if T == 'a':\n    return a_mm(p, value)\nreturn mm(p, value)",
)
OTHERS = (
    *["T = '?'"] * 4,
    "T = computed()",
    "query = cast(query, T)",
    "key = cast(key, T)",
    "value = cast(value, T)",
    "q = cast(query, T)",
    "q, k = query, key",
    "q, k = pair(query, key, T)",
    "wanted = T == 'a'",
    "if wanted:\n    p = p.to()\n    q = a_cast(q)",
    "rounds = cast if T == 'a' else same",
    "q = rounds(query)",
    "log(query, key, T)",
    "p = softmax(s)",
    "p = cast(p, T)",
    "p = softmax(typed_mm(query, key, T))",
    "if T == 'a':\n    p = a_cast(p)",
    "if T == 'a':\n    query = a_cast(query)\nelse:\n    key = cast(key, T)",
    "if T == 'a':\n    T = '?'",
    "s = scale(s, T)",
    "s = s.to()",
    "def inner(x):\n    return cast(x, T)\nq = inner(query)",
)
BLOCKS = (
    "if f0:\n{0}",
    "if f1:\n{0}\nelse:\n{1}",
    "if f0:\n{0}\n    return c",
    "for _ in range(2):\n{0}",
    "for _ in range(2):\n{0}\n    if f0:\n        break",
    "try:\n{0}\n    fail(f1)\n{1}\nexcept ValueError:\n{2}",
    "with scope():\n{0}",
    "match f0:\n    case True:\n        p = softmax(s)\n    case _:\n        p = softmax(mm(q, k))",
)
START = """\
T = '?'
q, k, rounds, wanted = query, key, same, False
s = mm(query, key)
p = softmax(s)
c = mm(p, value)
"""


class Term(tuple):
    """What a value is computed from, as a tree of calls."""

    __slots__ = ()

    def to(self):
        """No rounding: as of a dtype."""
        return self


class Scope:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def call(name):
    return lambda *values: Term((name, *values))


def fail(flag):
    if flag:
        raise ValueError


PRODUCTS = ("mm", "a_mm", "typed_mm", "product")
NAMES = {name: call(name) for name in (*PRODUCTS, "cast", "a_cast", "same", "softmax", "scale")} | {
    "pair": lambda a, b, quant_type: (Term(("cast", a, quant_type)), Term(("cast", b, quant_type))),
    "computed": lambda: "computed",
    "log": lambda *_: None,
    "fail": fail,
    "scope": Scope,
}


def block(rng, size, depth=0):
    parts = []
    for _ in range(size):
        if depth < 2 and rng.random() < 0.25:
            inner = (block(rng, rng.randint(1, 3), depth + 1) for _ in range(3))
            parts.append(rng.choice(BLOCKS).format(*(textwrap.indent(b, "    ") for b in inner)))
        else:
            parts.append(rng.choice((*SCORES, *CONTEXT[:-1], *OTHERS)))
    return "\n".join([*parts, "pass"])


def function(seed):
    """The body of a `forward` that computes attention in some way, with at most four literals."""
    rng = random.Random(seed)
    while True:
        steps = [START]
        for forms in (SCORES, ("p = softmax(s)", "p = cast(softmax(s), T)"), CONTEXT):
            steps += [block(rng, rng.randint(0, 3)), rng.choice(forms)]
        body = "\n".join([*steps, "return c\n"])
        if body.count("?") <= len(VALUES):
            return body.replace("T", VARIABLE).replace(f"{VARIABLE}rue", "True")


def filled(body, values):
    for value in values:
        body = body.replace("?", value, 1)
    return attention(body)


def products(term, found):
    """Return `term` with a hole for each product, which goes into `found` by its site."""
    if not isinstance(term, Term):
        return term
    new = Term(products(part, found) for part in term)
    if term[0] not in PRODUCTS:
        return new
    site = "pv" if "('value',)" in str(new) else "qk"
    found[site].append(new)
    return Term(("hole",))


def run(text):
    """Return {site: its products, for all flags}."""
    space = dict(NAMES)
    exec(text, space)
    found = {"qk": [], "pv": []}
    for flags in itertools.product([False, True], repeat=len(FLAGS)):
        space |= dict(zip(FLAGS, flags, strict=True))
        operands = (Term((name,)) for name in ("query", "key", "value"))
        products(space["DotProductAttention"]().forward(*operands), found)
    return found


def dependent_sites(body, index):
    """Return the sites whose products change with the literal of this index."""
    seen = set()
    for others in itertools.product("ab", repeat=body.count("?") - 1):
        texts = (filled(body, [*others[:index], value, *others[index:]]) for value in "ab")
        old, new = map(run, texts)
        seen |= {site for site in old if old[site] != new[site]}
    return seen


def faults(body, places):
    """What is wrong with the places of the sites that may be set."""
    used = VALUES[: body.count("?")]
    dependent = {value: dependent_sites(body, i) for i, value in enumerate(used)}
    for site, place in places.items():
        missed = [value for value in used if site in dependent[value]] if not place.refusal else []
        yield from (f"{site} lacks {value}" for value in missed if value not in place.values)
        for value in place.values if not place.refusal else ():
            if unsaid := dependent[value] - {site, *place.shares}:
                yield f"{value} of {site} is also of {unsaid}"


@pytest.mark.parametrize(
    "seeds", [range(200), pytest.param(range(200, 6500), marks=pytest.mark.heavy)], ids=len
)
def test_what_may_be_set_is_what_depends_on_it(seeds):
    accepted = 0
    for seed in seeds:
        body = function(seed)
        text = filled(body, VALUES)
        places = {place.name: place for place in sites.scan(ATTENTION, text.encode()).sites}
        if any(not place.refusal for place in places.values()):
            accepted += 1
            assert [*faults(body, places)] == [], text
    assert accepted > len(seeds) / 4
