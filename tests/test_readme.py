"""Every example in the README runs."""

import re

import pytest
from common import NAMES, ROOT, python

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_there_is_one_for_each_framework():
    assert sorted(re.search(r"from (\w+)_ops import", block)[1] for block in BLOCKS) == ["jax", "torch"]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: re.search(r"from (\w+_ops) import", block)[1])
def test_example(block):
    framework = re.search(r"from (\w+)_ops import", block)[1]
    if framework not in NAMES:
        pytest.skip(f"needs {framework}")
    done = python("-c", block + "\nprint('finished')", env={"TRITON_INTERPRET": ""})
    assert done.stdout.strip() == "finished", done.stderr
