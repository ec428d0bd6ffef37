# make demo: the main job on a bare machine. make check: format, lint and types, in a minute.
# make docs: the site, in build/site; a broken link fails.
# make test: make check, then all tests. All of them set everything up by themselves.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := unalike tests benchmarks docs/site setup.py

.PHONY: demo test test-faults fuzz check bench docs clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: .venv/installed
	$(BIN)/unalike run digits --workers 2 --safeguard

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope

test-faults: .venv/installed
	UNALIKE_FAULTS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v tests/engines/test_hostile.py \
		tests/engines/test_ray.py tests/engines/test_flare.py tests/engines/test_flower.py

fuzz: .venv/installed
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(BIN)/python tests/engines/fuzz.py 1000000

check: .venv/installed
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

docs: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python docs/site/build.py

bench: .venv/installed
	for name in muscle engine memory bytes digits ray flare; do $(BIN)/unalike bench $$name || exit 1; done
	for name in budget safeguard; do $(BIN)/unalike bench $$name --jobs 2 || exit 1; done

clean:
	rm -rf .venv runs build *.egg-info
