# `make demo` and `make test` set up all that they need in $(VENV), inside this
# checkout, and nothing again while setup.py and pyproject.toml stay as they are.

VENV ?= .venv
PYTHON ?=
ARGS ?=
JOBS ?= logical

# matplotlib and others keep their caches there, and NLTK what it downloads as soon as
# ESPnet 202511 imports g2p_en
export XDG_CACHE_HOME := $(CURDIR)/$(VENV)/cache
export XDG_CONFIG_HOME := $(CURDIR)/$(VENV)/config
export NLTK_DATA := $(CURDIR)/$(VENV)/nltk_data
export PIP_NO_CACHE_DIR := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

SETUP_FILES := setup.py pyproject.toml MANIFEST.in $(wildcard startup/*)
DEMO := egs/mini_an4/asr_transducer1
AN4 := egs/an4/asr_transducer1
FSDD := egs/fsdd/asr_transducer1

help:
	@echo 'make demo    train and decode mini_an4, print the table of error rates'
	@echo '             (ARGS="--stage 5": options for $(DEMO)/run.sh)'
	@echo 'make an4     train and decode AN4, print the table of error rates; it says first'
	@echo '             how long that takes (ARGS="--archive FILE": the corpus is there)'
	@echo 'make fsdd    train and decode digit strings of FSDD, from audio, likewise'
	@echo '             (ARGS="--test_speaker theo": options for $(FSDD)/run.sh)'
	@echo 'make test    ruff and pytest (ARGS="-k bias": options for pytest; as many files'
	@echo '             at once as there are cores, at most four: JOBS=0 is one process)'
	@echo 'make clean   remove what the recipes, builds and tests wrote'
	@echo 'make distclean   the same, and $(VENV)'
	@echo
	@echo 'PYTHON=FILE  Python for a new $(VENV) (default: the newest of 3.13 to 3.10'
	@echo '             on the PATH or from pyenv)'
	@echo 'VENV=DIR     another environment, e.g. .venv311'

# The newest Python that can make an environment.  Trying each out matters: pyenv's
# shims are there for versions that are not, and Debian's Python can lack ensurepip.
define find_python
	python='$(PYTHON)'; \
	if [ -z "$$python" ]; then \
		versions=$$(pyenv root 2>/dev/null || echo "$$HOME/.pyenv")/versions; \
		for version in 3.13 3.12 3.11 3.10; do \
			for file in python$$version "$$versions"/$$version.*/bin/python$$version; do \
				if [ -z "$$python" ] && "$$file" -c 'import ensurepip, ssl, venv' 2>/dev/null; \
				then python=$$file; fi; \
			done; \
		done; \
	fi; \
	[ -n "$$python" ] || { echo 'make: no Python 3.10 to 3.13 found; name one: make PYTHON=FILE' >&2; exit 1; }
endef

# pip 26.3 refuses ESPnet 202511, over a URL in an extra of its dependency ci_sdr.
#
# $(call install,EXTRA): this package with its extra in $(VENV).  A new environment
# where there is none, it does not run, or PYTHON is another version.
define install
	@set -eu; \
	venv_python='$(VENV)/bin/python'; stamp='$(VENV)/.installed-$(1)'; \
	show='import sys; print(sys.version)'; \
	if ! "$$venv_python" -c 'import pip' 2>/dev/null \
		|| { [ -n '$(PYTHON)' ] && [ "$$('$(PYTHON)' -c "$$show")" != "$$("$$venv_python" -c "$$show")" ]; }; \
	then \
		$(find_python); \
		"$$python" -c 'import ensurepip, ssl, venv' || exit 1; \
		echo "Making $(VENV) with $$python"; \
		rm -rf '$(VENV)'; \
		"$$python" -m venv '$(VENV)'; \
		mkdir -p '$(VENV)/nltk_data'; \
	fi; \
	state="$(CURDIR) $$(cksum $(SETUP_FILES))"; \
	versions='import importlib.metadata as m; m.version("espnet"), m.version("espnet-mega-bias")'; \
	if [ "$$(cat "$$stamp" 2>/dev/null)" != "$$state" ] || ! "$$venv_python" -c "$$versions" 2>/dev/null; \
	then \
		echo "Installing '.[$(1)]' into $(VENV)"; \
		rm -f "$$stamp"; \
		"$$venv_python" -m pip install --quiet --upgrade 'pip<26.3'; \
		"$$venv_python" -m pip install --progress-bar off -e '.[$(1)]'; \
		echo "$$state" >"$$stamp"; \
	fi
endef

demo:
	$(call install,recipe)
	@$(DEMO)/run.sh --python '$(VENV)/bin/python' --max_train_wer 0 $(ARGS)

an4:
	$(call install,recipe)
	@$(AN4)/run.sh --python '$(VENV)/bin/python' $(ARGS)

fsdd:
	$(call install,recipe)
	@$(FSDD)/run.sh --python '$(VENV)/bin/python' $(ARGS)

test: export OMP_NUM_THREADS ?= 1
test:
	$(call install,test)
	'$(VENV)/bin/python' -m ruff check .
	'$(VENV)/bin/python' -m ruff format --check .
	'$(VENV)/bin/python' -m pytest -n '$(JOBS)' --maxprocesses 4 --dist loadfile $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -rf egs/*/*/data egs/*/*/downloads egs/*/*/dump egs/*/*/exp egs/*/*/logs egs/*/*/work
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf '$(VENV)'

.PHONY: help demo an4 fsdd test clean distclean
