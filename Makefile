# The commands of this repository. `make serve` and `make test` need only Python 3.11+, git and make.
.PHONY: serve test install check cases bench bench-drafters train-drafter oracles report soak compose-test images gpu clean
.DEFAULT_GOAL := help

help:
	@echo "make serve     install if needed and serve the default model on http://127.0.0.1:8000"
	@echo "make test      install if needed and run the tests (about 20 minutes on two cores)"
	@echo "make install   install only"
	@echo "make check     format, lint, types, architecture tests (under a minute)"
	@echo "make cases     the long forms of the failure cases"
	@echo "make bench     print tokens per second, time to first token and step overhead"
	@echo "make bench-drafters  acceptance and tokens per second of every drafter, for each kind of prompt"
	@echo "make train-drafter  train a drafter for the model (ARGS=\"eagle3 OUT\")"
	@echo "make oracles   the drafters against implementations nobody here wrote (installs 3 GB into .venv-oracles)"
	@echo "make report    serve, trace one request and draw its rounds into report/"
	@echo "make soak      a fleet under load and harm for 10 minutes (ARGS=\"--minutes 3\"), and a report"
	@echo "make images    build the images of docker-compose.yml"
	@echo "make compose-test  run the whole fleet in Docker, kill parts of it and count (minutes)"
	@echo "make gpu       losslessness and a small benchmark on a CUDA device, if there is one"

install:
	@deploy/create_environment.sh runtime

serve: install
	@.venv/bin/drafthouse serve $(ARGS)

.venv-test:
	@deploy/create_environment.sh test
.PHONY: .venv-test

test: .venv-test
	.venv/bin/python -m pytest -q -n 2 --dist loadfile $(ARGS)

cases: .venv-test
	CASES_LONG=1 .venv/bin/python -m pytest -q tests/cases $(ARGS)

check: .venv-test
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/python -m pytest -q tests/architecture

bench: .venv-test
	.venv/bin/python -m tests.bench $(ARGS)

bench-drafters: .venv-test
	.venv/bin/python -m tests.bench.drafters $(ARGS)

train-drafter: install
	@.venv/bin/python -m tools.train_drafter $(ARGS)

oracles:
	@tests/oracles/create_environment.sh
	.venv-oracles/bin/python -m pytest -q tests/oracles $(ARGS)

report: .venv-test
	@.venv/bin/drafthouse report --serve $(ARGS)

soak: .venv-test
	.venv/bin/python -m tests.soak $(ARGS)

images:
	docker-compose build engine frontend

compose-test: .venv-test
	@tests/deploy/docker_engine.sh
	COMPOSE_TEST=1 .venv/bin/python -m pytest -q tests/deploy/test_compose.py $(ARGS)

gpu: install
	.venv/bin/python tests/gpu/check.py

clean:
	rm -rf .venv .venv-oracles
