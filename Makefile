# make help lists the targets.
PYTHON ?= python3
# Many processes are started by the tests: each would compile the program anew.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
# The oldest Ray that pyproject.toml allows, in an environment of its own over the first.
OLDEST_RAY := 2.52
OLDEST_VENV := .venv-oldest-ray
BIN := $(VENV)/bin
# Tests share nothing but the machine.
PARALLEL := tools/parallel_tests.py
KERNEL_SOURCES := $(shell find kernels -name '*.cpp' -o -name '*.inc' -o -name '*.h')
SOURCES := pyproject.toml CMakeLists.txt $(shell find kernels runner workers -name '*.py' -o -name '*.cpp' -o -name '*.inc' -o -name '*.h' -o -name 'CMakeLists.txt')

.PHONY: help format hooks tidy coverage run test test-slow test-oldest-ray test-all lint lint-format lint-program lint-tests bench wheel sanitize sanitize-threads emulate clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

run: $(VENV)/installed ## install, and run the demo job
	$(BIN)/outrider run examples/prompts.jsonl --draft-tokens 4 --precision fp32 --draft-precision fp32

test: $(VENV)/testable ## the fast tests, one to two minutes
	$(BIN)/python $(PARALLEL) --in-memory

# Those that start a Ray wait for one another: they pin their actors to the machine's cores.
test-slow: $(VENV)/testable ## the tests that start Ray, build kernels or kill processes
	OUTRIDER_ALL_EXAMPLES=1 $(BIN)/python $(PARALLEL) -- -m "slow and not ray and not cluster"
	$(BIN)/python -m pytest -q -m "slow and (ray or cluster)"

# What another Ray could change: the fast tests of files that import it (tests/support/of_ray.py), and some that run a job.
test-oldest-ray: $(OLDEST_VENV)/installed ## what another Ray could change, with the oldest Ray that is allowed
	$(OLDEST_VENV)/bin/python $(PARALLEL) tests/unit -- -m "oldest_ray and not slow"
	$(OLDEST_VENV)/bin/python -m pytest -q -m oldest_ray tests/ray

test-all: $(VENV)/testable $(OLDEST_VENV)/installed ## the slow tests, and those of Ray on its oldest version, side by side
	$(BIN)/python tools/all_tests.py

format: $(VENV)/testable ## ruff's formatter, and clang-format for the kernels
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(KERNEL_SOURCES)

hooks: $(VENV)/testable ## git hooks that format and check what is committed
	$(BIN)/pre-commit install

tidy: $(VENV)/testable ## clang-tidy over the kernels (a minute)
	$(BIN)/cmake -S . -B build/tidy -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >/dev/null
	$(BIN)/clang-tidy -p build/tidy --quiet kernels/src/*.cpp

coverage: $(VENV)/testable ## which lines the fast tests run: build/coverage/index.html
	$(BIN)/python -m pytest -q -n logical --maxprocesses 8 --dist loadfile --cov=outrider --cov-report=term:skip-covered --cov-report=html:build/coverage

lint: lint-format lint-program lint-tests ## ruff, mypy and clang-format; side by side with -j

lint-format: $(VENV)/testable
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(KERNEL_SOURCES)

lint-program: $(VENV)/testable
	$(BIN)/mypy

lint-tests: $(VENV)/testable
	$(BIN)/mypy --config-file tests/mypy.ini tests

wheel: $(VENV)/testable ## a wheel in dist/ that needs no compiler where it is installed (glibc of this machine or newer)
	rm -rf build/wheel
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --plat auto --wheel-dir dist build/wheel/*.whl

bench: $(VENV)/testable ## a short benchmark of the bundled pair
	$(BIN)/outrider bench --compare
	$(BIN)/python benchmarks/forward.py --shape 160m --precision w4a8

# Leaks are not looked for: the interpreter keeps what it likes.
sanitize: $(VENV)/testable ## the tests of the kernels with the address and undefined behaviour sanitizers (needs cmake)
	cmake -S . -B build/sanitize -DOUTRIDER_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=None
	cmake --build build/sanitize --parallel 2
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 OUTRIDER_LIBRARY=$(CURDIR)/build/sanitize/kernels/liboutrider_kernels.so \
	  $(BIN)/python -m pytest -q $(wildcard tests/kernels/test_kernels_*.py)

# Tests that go over instruction sets try the emulated ones, too; of several threads they wait long where others use the cores.
emulate: $(VENV)/testable ## the tests of the kernels with AVX-512 and AMX emulated, on a machine without (needs cmake)
	cmake -S . -B build/emulate -DOUTRIDER_EMULATE=ON -DCMAKE_BUILD_TYPE=Release
	cmake --build build/emulate --parallel 2
	OUTRIDER_LIBRARY=$(CURDIR)/build/emulate/kernels/liboutrider_kernels.so \
	  $(BIN)/python -m pytest -q $(wildcard tests/kernels/test_kernels_*.py)

sanitize-threads: $(VENV)/testable ## those that use several threads, with the thread sanitizer (minutes on a quiet machine)
	cmake -S . -B build/sanitize-threads -DOUTRIDER_SANITIZE=thread -DCMAKE_BUILD_TYPE=None
	cmake --build build/sanitize-threads --parallel 2
	LD_PRELOAD="$$(gcc -print-file-name=libtsan.so)" TSAN_OPTIONS="halt_on_error=1 die_after_fork=0" OPENBLAS_NUM_THREADS=1 \
	  OUTRIDER_LIBRARY=$(CURDIR)/build/sanitize-threads/kernels/liboutrider_kernels.so \
	  $(BIN)/python -m pytest -q -x tests/kernels/test_kernels_cache.py tests/kernels/test_kernels_forward.py \
	    tests/kernels/test_kernels_halves.py tests/kernels/test_kernels_misuse.py tests/kernels/test_kernels_recurrence.py \
	    tests/kernels/test_kernels_sampler.py tests/kernels/test_kernels_shortlist.py \
	    -k "thread or branch or fork or pieces or walks or masks or (whole_passes and (paired or many or long))"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Editable, so that the sources here are what runs; repeated when a file comes or goes.
$(VENV)/installed: $(VENV)/bin/python $(SOURCES)
	$(BIN)/pip install --quiet --editable .
	touch $@

# One installation, since each builds the kernels. What is imported is compiled then: all of it would take most of a minute.
$(VENV)/testable: $(VENV)/bin/python $(SOURCES)
	$(BIN)/pip install --quiet --no-compile --editable '.[test]'
	touch $(VENV)/installed $@

# All else comes from the first environment; the program is started with this one's Python.
$(OLDEST_VENV)/installed: $(VENV)/testable pyproject.toml
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/pip install --quiet --no-deps 'ray==$(OLDEST_RAY).*'
	echo "import site; site.addsitedir('$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")')" \
	  > "$$($(OLDEST_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/over_the_first.pth"
	sed '1s|.*|#!$(CURDIR)/$(OLDEST_VENV)/bin/python|' $(BIN)/outrider > $(OLDEST_VENV)/bin/outrider
	chmod +x $(OLDEST_VENV)/bin/outrider
	touch $@

clean: ## remove what was installed and built
	rm -rf $(VENV) $(OLDEST_VENV) build dist
