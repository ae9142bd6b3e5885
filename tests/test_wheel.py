"""The wheel has all that the packages need and nothing else, and the examples of the README run from it in an empty folder."""

import zipfile

import pytest
from common import NAMES, ROOT, python
from test_docs import of

PACKAGES = ("bridge", "torch_ops", "jax_ops")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves folders behind
    source.mkdir()
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    done = python("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source))
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl")
    return file


def test_files(wheel):
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = [file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.suffix in (".py", ".json", ".typed")]
    assert files == {str(file.relative_to(ROOT)) for file in wanted}


@pytest.mark.parametrize("code", of("python")[next(page for page in of("python") if page.name == "README.md")], ids=["torch", "jax"])
def test_readme_from_the_wheel(code, wheel, tmp_path):
    framework = "torch" if "torch_ops" in code else "jax"
    if framework not in NAMES:
        pytest.skip(f"needs {framework}")
    done = python("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "site"), str(wheel))
    assert done.returncode == 0, done.stderr
    code = f"import bridge\nassert bridge.__file__.startswith({str(tmp_path)!r})\n{code}\nprint('finished')"
    done = python("-c", code, env={"TRITON_INTERPRET": "", "PYTHONPATH": str(tmp_path / "site")}, folder=tmp_path)
    assert done.stdout.strip() == "finished", done.stderr
