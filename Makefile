# Every target installs what it needs first (scripts/setup), so each works in a fresh clone.
VENV := .venv/bin

.PHONY: demo test test-aarch64 test-verbs test-vllm test-vllm-smoke test-vllm-gpu test-weights test-moe test-gpu test-sglang test-openai test-clients test-page test-upgrade test-stability lint docs bench bench-control bench-control-endurance bench-router bench-gpu bench-vllm bench-weights bench-moe figures sanitize fuzz model chaos chaos-control chaos-vllm chaos-weights chaos-moe soak attack simulate simulate-moe router-defects helm-test verify clean

demo:
	@DEVICE=$(DEVICE) scripts/demo

test:
	@scripts/setup test
	@scripts/test

# The C++ tests for ARM, under qemu.
test-aarch64:
	@scripts/setup aarch64
	@scripts/test-aarch64

test-verbs:
	@scripts/setup verbs
	@scripts/test-verbs

test-vllm:
	@scripts/setup test
	@scripts/test-vllm

# Of it, what CI runs: a few minutes.
test-vllm-smoke:
	@scripts/setup test
	@scripts/test-vllm --smoke

test-vllm-gpu:
	@scripts/setup test
	@scripts/test-vllm-gpu

test-weights:
	@scripts/setup test
	@scripts/test-weights

test-moe:
	@scripts/setup test
	@scripts/test-moe

test-gpu:
	@scripts/setup test
	@scripts/test-gpu

# An extra, as SGLang's packages on PyPI are not meant for a CPU.
test-sglang:
	@scripts/setup test
	@scripts/test-sglang

# A pair behind the router beside one aggregated vLLM: OPENAI="--model llama --every 20" and the like.
test-openai:
	@scripts/setup test
	@scripts/test-openai $(OPENAI)

# CLIENTS="--client litellm" and the like.
test-clients:
	@scripts/setup test
	@scripts/test-clients $(CLIENTS)

# REVISION=6298a4ab is the older one.
test-upgrade:
	@scripts/test-upgrade $(REVISION)

test-page:
	@scripts/setup page
	@scripts/test-page

# All tests, RUNS times, on a machine that is busy and stalls.
test-stability:
	@scripts/setup test
	@$(VENV)/python -m verify.stability --runs $(or $(RUNS),3)

lint:
	@scripts/setup lint
	@scripts/lint

docs:
	@scripts/setup lint
	@scripts/docs
	@echo "build/docs/index.html"

bench:
	@scripts/setup demo
	@$(VENV)/kvxfer bench $(BENCH)

bench-control:
	@scripts/setup test
	@PYTHONPATH=$(CURDIR) $(VENV)/python -m benchmarks.control $(BENCH)

bench-control-endurance:
	@scripts/setup test
	@PYTHONPATH=$(CURDIR) $(VENV)/python -m benchmarks.control.endurance $(BENCH)

bench-router:
	@scripts/setup test
	@PYTHONPATH=$(CURDIR) $(VENV)/python -m benchmarks.router $(BENCH)

# Without internet: docs/gpus.md says what has to be there.
bench-gpu:
	@scripts/bench-gpu $(BENCH)

# BENCH="--gb 8" and the like for its options.
bench-weights:
	@scripts/setup test
	@scripts/bench-weights $(BENCH)

# BENCH="--case 2x128" and the like for its options.
bench-moe:
	@scripts/setup moe
	@scripts/bench-moe $(BENCH)

bench-vllm:
	@scripts/setup test
	@scripts/bench-vllm $(BENCH)

# All of these in a smoke size, in a fresh copy of this tree.
figures:
	@scripts/setup test
	@$(VENV)/python -m verify.figures

# Not where the same engine has passed before; WHOLE=1 in any case.
sanitize:
	@scripts/setup native
	@scripts/sanitize $(if $(WHOLE),--whole)

# make fuzz SECONDS=600: so long for each target. CI has no time to reach every line: .ci/run.
fuzz:
	@scripts/setup fuzz
	@scripts/fuzz --seconds $(or $(SECONDS),30) --coverage

model:
	@scripts/setup test
	@$(VENV)/python -m verify.model

# Workers and their network, then the control plane.
chaos:
	@scripts/setup verbs
	@PATH=$$PATH:/usr/sbin:/sbin $(VENV)/python -m verify.faults $(if $(ROUNDS),--rounds $(ROUNDS))
	@scripts/chaos-control

chaos-control:
	@scripts/setup test
	@scripts/chaos-control

chaos-vllm:
	@scripts/setup test
	@KVXFER_VLLM_PYTHON=$$(scripts/vllm-python) $(VENV)/python -m verify.faults.vllm

chaos-weights:
	@scripts/setup test
	@$(VENV)/python -m verify.faults.weights $(if $(ROUNDS),--rounds $(ROUNDS))

# ROUNDS groups of two to eight processes.
chaos-moe:
	@scripts/setup test
	@$(VENV)/python -m verify.faults.moe $(if $(ROUNDS),--rounds $(ROUNDS))

soak:
	@scripts/setup test
	@$(VENV)/python -m verify.faults.soak --minutes $(or $(MINUTES),5)

attack:
	@scripts/setup test
	@scripts/attack

# SEEDS=… of a fleet on virtual time; SIMULATE="--json" and the like for the rest.
simulate:
	@scripts/setup test
	@$(VENV)/python -m verify.simulation --seeds $(or $(SEEDS),100000) $(SIMULATE)

# Views of MoE groups, on virtual time.
simulate-moe:
	@scripts/setup test
	@$(VENV)/python -m verify.moe --seeds $(or $(SEEDS),20000)

# Patches of the router, each of which a test has to catch.
router-defects:
	@scripts/setup test
	@$(VENV)/python -m verify.router_defects

helm-test:
	@scripts/setup test
	@scripts/helm-test

# Everything that takes long (hours); what has passed on this very tree is not run again.
verify:
	@scripts/setup ci
	@$(VENV)/python -m verify $(foreach step,$(STEP),--step $(step))

clean:
	rm -rf build dist .venv
