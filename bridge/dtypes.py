"""Types of numbers by name, so that no framework is needed to speak of them."""

SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
FLOATS = tuple(SIZES)
INTEGERS = ("int32", "int64")


def wide(dtype: str) -> str:
    """The type that arithmetic on `dtype` is done in: float64 for float64, float32 for all others."""
    return "float64" if dtype == "float64" else "float32"
