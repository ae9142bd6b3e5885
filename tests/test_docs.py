"""What the documentation says is so: every block of code runs, every command is one, and the reference has every public name."""

import argparse
import os
import re
import runpy
import shlex
import sys
import tomllib
from importlib import import_module

import pytest
from common import NAMES, ROOT, python

PAGES = sorted(page.relative_to(ROOT) for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```([\w{}-]*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = {page: BLOCK.findall((ROOT / page).read_text()) for page in PAGES}
LANGUAGES = {"", "python", "pycon", "sh", "{eval-rst}", "{literalinclude}", "{toctree}"}


def of(language):
    return {page: [code for kind, code in blocks if kind == language] for page, blocks in BLOCKS.items()}


# The blocks of a page go on from one another; those of the README are for one framework each.
PROGRAMS = [(page, "\n".join(codes)) for page, codes in of("python").items() if codes and page.name != "README.md"]
PROGRAMS += [(page, code) for page, codes in of("python").items() if page.name == "README.md" for code in codes]
COMMANDS = [line.split("#")[0].strip() for codes in of("sh").values() for code in codes for line in code.splitlines()]


def test_every_block_has_a_language_that_is_looked_at():
    assert {kind for blocks in BLOCKS.values() for kind, _ in blocks} <= LANGUAGES
    assert sum(len(blocks) for blocks in BLOCKS.values()) == sum((ROOT / page).read_text().count("\n```") // 2 for page in PAGES)


@pytest.mark.parametrize(("page", "code"), PROGRAMS, ids=lambda value: getattr(value, "stem", ""))
def test_python(page, code, tmp_path):
    missing = {name for name in re.findall(r"\b(torch|jax)_ops\b", code) if name not in NAMES}
    if missing:
        pytest.skip(f"needs {missing}")
    done = python("-c", f"{code}\nprint('finished')", env={"TRITON_INTERPRET": ""}, folder=tmp_path)
    assert done.stdout.splitlines()[-1:] == ["finished"], done.stderr


@pytest.mark.skipif("torch" not in NAMES, reason="needs torch")
@pytest.mark.parametrize("page", [page for page, codes in of("pycon").items() if codes], ids=lambda page: page.stem)
def test_sessions(page, tmp_path):
    session = tmp_path / "session"
    session.write_text("\n".join(of("pycon")[page]))
    done = python("-m", "doctest", "-o", "ELLIPSIS", str(session), env={"TRITON_INTERPRET": ""})
    assert done.returncode == 0, done.stdout


class Parsed(Exception):
    """The arguments were understood."""


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {""}))
def test_commands(command, monkeypatch):
    words = shlex.split(command)
    while "=" in words[0]:  # variables of the environment
        words.pop(0)
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        name, asked = re.fullmatch(r"([\w-]+)\[([\w,]+)\]", words[2]).groups()
        assert name == "kernel-bridge"
        assert set(asked.split(",")) <= set(extras)
    else:
        assert words[0] == "python", command
        if words[1] == "-m":
            run, words = (lambda: runpy.run_module(words[0], run_name="__main__")), words[2:]
        else:
            run, words = (lambda: runpy.run_path(str(ROOT / words[0]), run_name="__main__")), words[1:]
        parse = argparse.ArgumentParser.parse_args

        def parsed(self, *arguments):
            parse(self, *arguments)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(os, "environ", dict(os.environ))
        with pytest.raises(Parsed):
            run()


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("bridge", "bridge"),
        *((f"{name}_ops", f"{name}_ops") for name in NAMES),
        *(("models", {"torch": "torch_ops.nn", "jax": "jax_ops.nnx"}[n]) for n in NAMES),
    ],
)
def test_reference_has_every_public_name(page, module):
    text = (ROOT / "docs" / "api" / f"{page}.md").read_text()
    described = {"ops", "require", "__version__", "MambaConfig"}  # in words, or under the module that it comes from
    missing = [name for name in import_module(module).__all__ if name not in described and f":: {module}.{name}\n" not in text]
    assert not missing


def test_troubleshooting_quotes_messages_that_exist():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [piece for line in page.splitlines() if line.startswith("#") for piece in re.findall('"(.*?)"', line)]
    assert len(quoted) > 10
    sources = "".join(file.read_text() for folder in ("bridge", "torch_ops", "jax_ops") for file in (ROOT / folder).rglob("*.py"))
    assert not [part for piece in quoted for part in piece.split("...") if part.strip() not in sources]
