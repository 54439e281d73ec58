# make demo     train, kill, resume, compare: the whole thing at work, CPU only, a few minutes
# make install  make the virtual environment .venv (the other targets do so by themselves); . .venv/bin/activate
# make test     run the tests                      make test ARGS="-k config"
# make lint     form, types, documents             make lint ARGS=--fix repairs what can be repaired
# make bench    all ways to save side by side, with plots, 12 minutes       make bench ARGS="--dir /scratch --quick"
# make stress   kills, power losses, saves by the thousand, half an hour    make stress ARGS="--kills 50 --saves 500"
# make docs     check the links, paths and commands in the documents
# make clean    remove what the targets above made
#
# Each makes its own virtual environment when it is missing or out of date, and needs no more than
# Python >= 3.10, make and pip: make PYTHON=python3.12 VENV=/somewhere/venv test

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
export PYTHON VENV

INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test lint bench stress docs clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt scripts/install
	@scripts/install

demo: $(INSTALLED)
	@$(VENV)/bin/python scripts/demo.py $(ARGS)

test: $(INSTALLED)
	@scripts/test $(ARGS)

lint: $(INSTALLED)
	@scripts/lint $(ARGS)

bench: $(INSTALLED)
	@scripts/bench $(ARGS)

stress: $(INSTALLED)
	@$(VENV)/bin/python scripts/stress.py $(ARGS)

docs: $(INSTALLED)
	@$(VENV)/bin/python scripts/check_docs.py

clean:
	@scripts/clean
