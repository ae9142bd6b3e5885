# make parity   the main job: each frontend against its own autodiff of the loops, and the two against each other
# make test     all tests; where Python 3.12 is found, the JAX half again without torch, under the newest JAX
# make several  tests that take several devices: meshes and split sequences, on eight that the CPU plays, in several processes
# make matrix   docs/transforms.md from what the tests of transforms find
# make docs     the site in build/site, warnings as errors
# make lint     format, lint and types
#
# Each sets up what it needs: an environment in .venv (and .venv-jax) with the versions of constraints.txt.

PYTHON ?= python3
PYTHON312 ?= $(firstword $(foreach p,$(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12) $(shell command -v python3.12 2>/dev/null),$(if $(shell $(p) -c 'print(1)' 2>/dev/null),$(p))))
PIP := -m pip install --quiet --disable-pip-version-check -c constraints.txt
JOBS ?= 2
COMMA := ,
GPU := $(wildcard /dev/nvidia0)
EXTRAS := $(if $(GPU),cuda,torch$(COMMA)jax)

.PHONY: parity test test-main test-jax several several-main several-jax matrix matrix-check docs lint clean

parity: .venv/done
	.venv/bin/python -m bridge parity

test: test-main $(if $(GPU),,$(if $(PYTHON312),test-jax))

test-main: .venv/done
	.venv/bin/python -m pytest -n $(JOBS) --dist worksteal --matrix=build/tests.json

# What can differ there: values, gradients, transforms, errors, and the lowering for GPUs. Triton and the kernels don't.
test-jax: .venv-jax/done
	.venv-jax/bin/python -m pytest -n $(JOBS) --dist worksteal -k "not test_triton and not float16" \
		$(foreach f,values gradcheck transforms errors imports compiling docs,tests/test_$f.py)

several: several-main $(if $(GPU),,$(if $(PYTHON312),several-jax))

several-main: .venv/done
	.venv/bin/python -m pytest -n $(JOBS) --dist worksteal tests/several --matrix=build/several.json

# Meshes are what changes from one JAX to the next.
several-jax: .venv-jax/done
	.venv-jax/bin/python -m pytest -n $(JOBS) --dist worksteal $(wildcard tests/several/test_jax_*.py) \
		-k "weighted or over_time or packed or errors"

matrix: .venv/done several-main
	.venv/bin/python -m pytest -n $(JOBS) --dist worksteal \
		$(foreach f,transforms torch_modes torch_compile,tests/test_$f.py) --matrix=build/tests.json
	.venv/bin/python tests/matrix.py build/tests.json build/several.json > docs/transforms.md

# Behind make test and make several.
matrix-check:
	.venv/bin/python tests/matrix.py --check build/tests.json build/several.json

docs: .venv/done
	.venv/bin/python -m sphinx -q -W --keep-going docs build/site

lint: .venv/done
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

# Without a GPU, JAX's plugin lets kernels be compiled for one all the same. Without its companion it does nothing else, so
# its dependencies stay out.
.venv/done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) -e '.[$(EXTRAS),dev]' jax-triton
	$(if $(GPU),,.venv/bin/python $(PIP) --no-deps jax-cuda13-plugin)
	touch $@

.venv-jax/done: pyproject.toml constraints.txt
	$(PYTHON312) -m venv .venv-jax
	.venv-jax/bin/python $(PIP) -e '.[jax,test]' jax-triton
	.venv-jax/bin/python $(PIP) --no-deps jax-cuda13-plugin
	touch $@

clean:
	rm -rf .venv .venv-jax build *.egg-info
