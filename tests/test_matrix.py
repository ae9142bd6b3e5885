"""docs/transforms.md speaks of the transforms that tests know, and is what matrix.py makes."""

from matrix import PAGE, TRANSFORMS, WORKS, names, page


def test_page_has_every_transform():
    assert names(PAGE.read_text()) == {framework: list(rows) for framework, rows in TRANSFORMS.items()}


def test_page_of_findings():
    made = page({("jax", "jit", "sinkhorn"): WORKS, ("jax", "jit", "mine"): "FAILS", ("torch", "grad", "mine"): WORKS})
    assert f"| jit | {WORKS} | FAILS |" in made
    assert "| transform | sinkhorn | mine |" in made
    assert names(made) == {framework: list(rows) for framework, rows in TRANSFORMS.items()}
