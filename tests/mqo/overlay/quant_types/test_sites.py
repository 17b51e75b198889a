import re
import textwrap

import pytest
from mqo.errors import OverlayError
from mqo.overlay.quant_types import sites
from mqo.overlay.tree import running_python
from mqo.quant.formats import SITES

from .lookalike import ATTENTION, LAYER, LAYERS, LINEAR, attention, layers


def places(path, text):
    content = text if isinstance(text, bytes) else text.encode()
    return {place.name: place for place in sites.scan(path, content).sites}


def forward(body):
    """The place of fprop; the body starts on line 5."""
    return places(LAYERS, layers(forward=textwrap.dedent(body).lstrip("\n")))["fprop"]


def attend(body):
    """The places in attention; the body starts on line 3."""
    return places(ATTENTION, attention(textwrap.dedent(body).lstrip("\n")))


def said(places):
    """{site: [(line, value)]}."""
    return {s: [(lit.line, lit.value) for lit in p.literals] for s, p in places.items()}


def test_three_literals_in_the_linear_class_and_two_in_one_function():
    assert said(places(LAYERS, layers())) == {
        "fprop": [(5, "hifp8")],
        "dgrad": [(11, "mxfp8")],
        "wgrad": [(15, "none")],
    }
    assert said(places(ATTENTION, attention())) == {"qk": [(3, "mxfp4")], "pv": [(6, "bf16")]}


def test_a_backward_before_the_forward_changes_nothing():
    text = layers().removesuffix(LAYER)
    head, rest = text.split("    def forward")
    forward, backward = rest.split("    def backward")
    turned = head + "    def backward" + backward + "\n    def forward" + forward + LAYER
    values = {site: place.values for site, place in places(LAYERS, turned).items()}
    assert values == {"fprop": ("hifp8",), "dgrad": ("mxfp8",), "wgrad": ("none",)}


def test_a_frozen_layer_and_a_module_level_literal_are_strays():
    text = layers() + "\ncustom_quant_type = 'a'\nclass Frozen:\n  custom_quant_type = 'b'\n"
    scan = sites.scan(LAYERS, text.encode())
    assert [p.line for p in scan.sites] == [5, 11, 15]
    line = text[: text.index("= 'a'")].count("\n") + 1
    assert scan.notes == tuple(
        f"{LAYERS}:{n} is a literal that no GEMM of a site reads" for n in (line, line + 2)
    )
    assert scan.due == ()


# -- which literal is the site's ---------------------------------------------------------------


def test_code_between_a_literal_and_its_gemm_does_not_matter():
    body = """
        custom_quant_type = "mxfp8"  # quant type 'none' is the other one

        # A comment with custom_quant_type = 'x'.
        total_input = gather(total_input)
        log('custom_quant_type', weight.shape)
        return typed_matmul(total_input, weight, custom_quant_type)
    """
    assert said({"fprop": forward(body)}) == {"fprop": [(5, "mxfp8")]}


def test_branches_may_have_a_literal_each():
    body = """
        if fused:
            custom_quant_type = 'mxfp8'
            y = fused_gemm(total_input, weight, custom_quant_type)
        else:
            custom_quant_type = 'none'
            y = typed_matmul(total_input, weight, custom_quant_type)
        return y
    """
    place = forward(body)
    assert said({"fprop": place}) == {"fprop": [(6, "mxfp8"), (9, "none")]}
    assert place.note == "lines 6 (mxfp8) and 9 (none)"
    assert not place.refusal


def test_what_overwrites_in_a_branch_is_refused_even_if_that_leaves():
    body = """
        custom_quant_type = 'mxfp8'
        if weight is None:
            custom_quant_type = None
            raise Missing(custom_quant_type)
        return typed_matmul(total_input, weight, custom_quant_type)
    """
    place = forward(body)
    assert place.values == ("mxfp8",)
    assert place.refusal.startswith(f"{LAYERS}:7 does not set custom_quant_type for fprop")


@pytest.mark.parametrize("after", ["None", "'none'"])
def test_a_type_counts_when_it_is_taken_even_if_the_variable_changes_before_the_gemm(after):
    body = f"""
        custom_quant_type = 'mxfp8'
        quantize = quantizer(custom_quant_type)
        custom_quant_type = {after}
        return torch.matmul(quantize(total_input), quantize(weight))
    """
    assert said({"fprop": forward(body)}) == {"fprop": [(5, "mxfp8")]}


def test_both_types_may_be_taken_before_both_gemms():
    body = """
        custom_quant_type = 'mxfp8'
        a = quantizer(custom_quant_type)
        custom_quant_type = 'none'
        b = quantizer(custom_quant_type)
        s = torch.bmm(a(query), a(key))
        return torch.bmm(b(softmax(s)), b(value))
    """
    assert said(attend(body)) == {"qk": [(3, "mxfp8")], "pv": [(5, "none")]}


def test_a_literal_that_rounds_an_operand_of_two_gemms_is_shared():
    body = """
        custom_quant_type = 'mxfp8'
        grad_output = cast(grad_output, custom_quant_type)
        dx = mm(grad_output, weight)
        custom_quant_type = 'none'
        if custom_quant_type == 'none':
            dw = mm(grad_output.t(), total_input)
        return dx, dw
    """
    found = places(LAYERS, layers(backward=textwrap.dedent(body).lstrip("\n")))
    assert said(found) == {
        "fprop": [(5, "hifp8")],
        "dgrad": [(11, "mxfp8")],
        "wgrad": [(11, "mxfp8"), (14, "none")],
    }
    assert {s: p.shares for s, p in found.items() if p.shares} == {
        "dgrad": ("wgrad",),
        "wgrad": ("dgrad",),
    }


def test_a_use_of_qks_literal_behind_its_gemm_makes_it_pvs_too():
    body = """
        custom_quant_type = 'mxfp8'
        s = typed_bmm(query, key, custom_quant_type)
        if custom_quant_type != 'none':
            s = s * 2
        custom_quant_type = 'none'
        return typed_bmm(softmax(s), value, custom_quant_type)
    """
    found = attend(body)
    assert said(found) == {"qk": [(3, "mxfp8")], "pv": [(3, "mxfp8"), (7, "none")]}
    assert found["qk"].shares == ("pv",)


def test_uses_in_a_chain_of_branches_belong_to_the_gemm_behind_them():
    body = """
        custom_quant_type = 'mxfp8'
        q = cast(query, custom_quant_type)
        s = torch.bmm(q, key)
        custom_quant_type = 'hifp8'
        s = softmax(s)
        if custom_quant_type == 'hifp8':
            return hif_bmm(s, value)
        elif custom_quant_type == 'mxfp8':
            return mx_bmm(s, value)
        return torch.bmm(s, value)
    """
    assert said(attend(body)) == {"qk": [(3, "mxfp8")], "pv": [(6, "hifp8")]}


def test_a_literal_that_nothing_reads_is_due_beside_its_absent_site():
    text = layers("custom_quant_type = 'mxfp8'\nreturn torch.matmul(total_input, weight)\n")
    scan = sites.scan(LAYERS, text.encode())
    assert (scan.sites[0].literals, scan.sites[0].note) == ((), "absent")
    assert scan.due == (
        f"{LAYERS}:5 is a literal that no GEMM of a site reads, and fprop has none",
    )


def test_the_binding_of_our_patches_decides_whatever_stands_around_it():
    body = """
        custom_quant_type = 'mxfp8'
        a = bind('qk', custom_quant_type, self)
        custom_quant_type = 'none'
        b = bind('pv', custom_quant_type, self)
        s = torch.bmm(a(query), a(key))
        return torch.bmm(b(softmax(s)), b(value))
    """
    found = attend(body)
    assert said(found) == {"qk": [(3, "mxfp8")], "pv": [(5, "none")]}
    assert all(place.bound for place in found.values())
    assert not any(place.bound for place in places(LAYERS, layers()).values())


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "custom_quant_type = os.environ['TYPE']",
        "custom_quant_type = 'mx' + 'fp8'",
        "custom_quant_type = None",
    ],
)
def test_a_literal_that_is_overwritten_before_its_gemm_is_refused(line):
    body = f"custom_quant_type = 'mxfp8'\n{line}\nreturn mm(total_input, custom_quant_type)\n"
    place = forward(body)
    assert place.refusal == (
        f"{LAYERS}:6 does not set custom_quant_type for fprop by a string literal"
    )
    assert (place.literals, place.line, place.due) == ((), 6, True)


@pytest.mark.parametrize(
    "line",
    [
        "if x: custom_quant_type = args.type",
        "try:\n    custom_quant_type = args.type\nexcept ImportError:\n    pass",
        "if x: del custom_quant_type",
    ],
)
def test_a_literal_that_may_be_overwritten_is_shown_and_refused(line):
    body = f"custom_quant_type = 'mxfp8'\n{line}\nreturn mm(total_input, custom_quant_type)\n"
    place = forward(body)
    assert re.fullmatch(
        rf"{LAYERS}:[67] does not set custom_quant_type for fprop by a string literal, "
        "over the literal at line 5",
        place.refusal,
    )
    assert (place.values, place.line, place.due) == (("mxfp8",), 5, True)


def test_the_overwritten_literal_of_one_site_leaves_the_other_alone():
    body = """
        custom_quant_type = 'mxfp8'
        s = typed_bmm(query, key, custom_quant_type)
        custom_quant_type = 'none'
        custom_quant_type = self.type
        return typed_bmm(softmax(s), value, custom_quant_type)
    """
    found = attend(body)
    assert said(found) == {"qk": [(3, "mxfp8")], "pv": []}
    assert found["pv"].refusal.startswith(f"{ATTENTION}:6 does not set custom_quant_type for pv")


def test_a_site_with_no_literal_at_all_but_a_computed_type_is_refused():
    place = forward("custom_quant_type = ctx.type\nreturn mm(total_input, custom_quant_type)\n")
    assert place.refusal == (
        f"{LAYERS}:5 does not set custom_quant_type for fprop by a string literal"
    )


def test_an_absent_site_is_refused_with_the_line_of_its_gemm():
    found = places(LAYERS, layers(backward="return mm(grad_output, weight)\n"))
    at = f"({LINEAR})"
    assert found["dgrad"].refusal == f"{LAYERS}:11 {at} has no literal for the GEMM of dgrad"
    assert found["wgrad"].refusal == f"{LAYERS}:3 {at} has no known GEMM of wgrad"
    assert not any(place.due for place in found.values())
    assert found["fprop"].values == ("hifp8",)


def test_a_literal_of_two_sites_is_shown_for_both():
    body = """
        custom_quant_type = 'mxfp8'
        s = typed_bmm(query, key, custom_quant_type)
        return typed_bmm(softmax(s), value, custom_quant_type)
    """
    found = attend(body)
    assert said(found) == {"qk": [(3, "mxfp8")], "pv": [(3, "mxfp8")]}
    assert (found["qk"].shares, found["pv"].shares) == (("pv",), ("qk",))
    assert not any(place.refusal or place.due for place in found.values())


def test_a_literal_in_a_branch_whose_reader_stands_behind_is_refused_and_shown_as_shared():
    body = """
        custom_quant_type = 'mxfp8'
        s = typed_bmm(query, key, custom_quant_type)
        if x:
            custom_quant_type = 'none'
        return typed_bmm(softmax(s), value, custom_quant_type)
    """
    found = attend(body)
    assert said(found) == {"qk": [(3, "mxfp8")], "pv": [(3, "mxfp8"), (6, "none")]}
    assert found["pv"].refusal.startswith(f"{ATTENTION}:6 does not set custom_quant_type for pv")
    assert found["pv"].due
    assert (found["qk"].shares, found["pv"].shares) == (("pv",), ("qk",))


def test_a_missing_file_or_class_is_due():
    scan = sites.scan(ATTENTION, None)
    assert {place.refusal for place in scan.sites} == {f"{ATTENTION} does not exist"}
    assert all(place.due and place.note == "absent" for place in scan.sites)
    found = places(LAYERS, "x = 1\n")
    assert all(p.due and p.refusal.startswith(f"{LAYERS} has no auto") for p in found.values())
    assert all(place.due for place in places(ATTENTION, "x = 1\n").values())


def test_two_classes_that_may_hold_the_sites_are_refused_at_the_second():
    text = attention() + attention().replace("DotProductAttention", "Other")
    place = places(ATTENTION, text)["qk"]
    assert place.refusal == f"{ATTENTION}:8 (Other) may hold the sites as well as line 1"
    assert place.due


def test_a_class_under_a_condition_is_found():
    text = "try:\n    import x\nexcept E:\n" + textwrap.indent(layers(), "    ")
    assert [place.line for place in places(LAYERS, text).values()] == [8, 14, 18]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"x = 1\n\nclass\n", 3),
        (b"x = 1\ny = '\xe9'\n", "[0-9]+"),
        (b"x = \0", "[0-9]+"),
        (b"x = " + b"-" * 9000 + b"1", 1),
        (attention(f"return {'1 + ' * 3000} 1\n").encode(), "[0-9]+"),
    ],
    ids=["broken", "not UTF-8", "a null byte", "nested too deeply", "a long sum"],
)
def test_what_is_no_python_is_an_error(content, line):
    with pytest.raises(OverlayError, match=rf"^{ATTENTION}:{line} .*Python {running_python()}"):
        sites.scan(ATTENTION, content)


# -- our tree ----------------------------------------------------------------------------------


def test_every_site_of_the_patched_tree_is_bound_to_a_literal_of_its_own(vendored):
    found = {
        place.name: place
        for path in (LAYERS, ATTENTION)
        for place in sites.scan(path, vendored.read(path)).sites
    }
    assert list(found) == list(SITES)
    assert all(place.bound and not place.refusal for place in found.values())
    assert len({lit for place in found.values() for lit in place.literals}) == len(SITES)


def test_upstreams_gemms_are_known_and_have_no_literal(vendored):
    for path in (LAYERS, ATTENTION):
        for place in sites.scan(path, vendored.pristine(path)).sites:
            assert "has no literal for the GEMM of" in place.refusal
