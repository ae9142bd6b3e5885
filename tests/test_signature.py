"""Signatures: parsing, and the sizes that they find."""

import pytest

from bridge.signature import Array, Given, Signature

TEXT = "x: b t d, A: d n, h?: b d n -> y: b t d like x, last?: b d n wide x"


def given(**shapes):
    return {name: Given(shape, "float32", "here") for name, shape in shapes.items()}


def test_parse():
    signature = Signature.parse(TEXT)
    assert [(i.name, i.forms, i.optional) for i in signature.inputs] == [
        ("x", (("b", "t", "d"),), False),
        ("A", (("d", "n"),), False),
        ("h", (("b", "d", "n"),), True),
    ]
    assert [(o.name, o.forms, o.optional, o.source, o.wide) for o in signature.outputs] == [
        ("y", (("b", "t", "d"),), False, "x", False),
        ("last", (("b", "d", "n"),), True, "x", True),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x: b t", "needs '->'"),
        ("x: b t -> y: b t", "needs 'like' or 'wide'"),
        ("x: b t -> y: b t like z", "no input"),
        ("x: b t, x: b -> y: b like x", "stands twice"),
        ("x: b ... -> y: b like x", "can only stand first"),
        ("x: ... n or b n -> y: b like x", "can only stand first"),
        ("x b t -> y: b like x", "not an argument"),
        ("x: b (int32 -> y: b like x", "not an argument"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        Signature.parse(text)


def test_sizes():
    sizes = Signature.parse(TEXT).check("f", given(x=(2, 3, 4), A=(4, 5)))
    assert dict(sizes) == dict(b=2, t=3, d=4, n=5)
    assert sizes.shape(("b", "d", "n")) == (2, 4, 5)


def test_leading_dimensions():
    signature = Signature.parse("a: ... n n, b: ... n -> c: ... n like a")
    sizes = signature.check("f", given(a=(2, 3, 4, 4), b=(2, 3, 4)))
    assert (sizes.leading, sizes["n"], sizes.shape(("...", "n"))) == ((2, 3), 4, (2, 3, 4))
    assert signature.check("f", given(a=(4, 4), b=(4,))).leading == ()
    with pytest.raises(ValueError, match=r"b must have shape \(\.\.\. n\) with \.\.\. = \(2,\) \(set by a\)"):
        signature.check("f", given(a=(2, 4, 4), b=(3, 4)))


FORMS = Signature.parse("x: b t, M: b n or b g n or t n, h?: s|b n, *, cuts?: s+1 (int32 int64) -> y: b t like x, last: s|b n wide x")


def test_forms():
    """A call means the form with its number of dimensions, and of several the first that fits."""

    def forms(**shapes):
        sizes = FORMS.sizes("f", shapes)
        return sizes.forms["M"], sizes

    assert forms(x=(2, 3), M=(2, 5))[0] == ("b", "n")
    assert forms(x=(2, 3), M=(3, 5))[0] == ("t", "n")
    assert forms(x=(3, 3), M=(3, 5))[0] == ("b", "n")
    assert forms(x=(2, 3), M=(2, 4, 5)) == (("b", "g", "n"), dict(b=2, t=3, g=4, n=5))
    with pytest.raises(ValueError, match=r"f: M must have shape \(b n\) or \(t n\) with .*t = 3 \(set by x\), got \(7, 5\)"):
        forms(x=(2, 3), M=(7, 5))
    with pytest.raises(ValueError, match=r"f: M must have shape \(b n\), \(b g n\) or \(t n\), got \(5,\)"):
        forms(x=(2, 3), M=(5,))


def test_a_dimension_that_another_argument_decides_on():
    plain = FORMS.sizes("f", dict(x=(2, 3), M=(2, 5), h=(2, 5)))
    assert (plain.forms["h"], plain.shape(plain.forms["last"])) == (("b", "n"), (2, 5))
    packed = FORMS.sizes("f", dict(x=(2, 3), M=(2, 5), h=(4, 5), cuts=(5,)))
    assert (packed["s"], packed.forms["h"], packed.shape(packed.forms["last"])) == (4, ("s", "n"), (4, 5))
    assert packed.shape(("s+1",)) == (5,)
    with pytest.raises(ValueError, match=r"f: cuts must have shape \(s\+1\) with s = 4 \(set by h\), got \(4,\)"):
        FORMS.sizes("f", dict(x=(2, 3), M=(2, 5), h=(4, 5), cuts=(4,)))
    with pytest.raises(ValueError, match=r"f: cuts must have shape \(s\+1\) with 0 <= s, got \(0,\)"):
        FORMS.sizes("f", dict(x=(2, 3), M=(2, 5), cuts=(0,)))


def test_integers():
    cuts = FORMS.inputs[-1]
    assert (cuts.dtypes, cuts.keyword, cuts.floating) == (("int32", "int64"), True, False)
    floats = given(x=(2, 3), M=(2, 5))
    with pytest.raises(TypeError, match="f: cuts must have one of the dtypes int32, int64, got float32"):
        FORMS.check("f", floats | given(cuts=(5,)))
    FORMS.check("f", floats | {"cuts": Given((5,), "int64")})


def test_the_message_says_who_set_a_size():
    with pytest.raises(ValueError, match=r"f: A must have shape \(d n\) with d = 4 \(set by x\), got \(7, 5\)"):
        Signature.parse(TEXT).check("f", given(x=(2, 3, 4), A=(7, 5)))


@pytest.mark.parametrize(
    ("dtype", "wide"), [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_dtypes_of_outputs(dtype, wide):
    y, last = Signature.parse(TEXT).outputs
    assert (y.dtype({"x": dtype}), last.dtype({"x": dtype})) == (dtype, wide)


def test_an_array_of_one_call_equals_its_twin():
    assert Array((2, 3), "float32") == Array((2, 3), "float32")
