# Every target first installs its requirements (scripts/setup), so each works in a fresh clone.
VENV := .venv/bin

.PHONY: demo test test-aarch64 test-verbs test-vllm test-vllm-smoke test-vllm-gpu test-weights test-moe test-gpu test-sglang test-openai test-clients test-page test-upgrade test-stability lint docs bench bench-control bench-control-endurance bench-router bench-gpu bench-vllm bench-weights bench-moe figures sanitize fuzz model chaos chaos-control chaos-vllm chaos-weights chaos-moe overload soak attack simulate simulate-moe router-defects helm-test verify clean

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

# The part of test-vllm that CI runs: a few minutes.
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

# Optional: SGLang's packages on PyPI are not meant for a CPU.
test-sglang:
	@scripts/setup test
	@scripts/test-sglang

# Compares a pair behind the router with one aggregated vLLM. Options: OPENAI="--model llama --every 20".
test-openai:
	@scripts/setup test
	@scripts/test-openai $(OPENAI)

# Options: CLIENTS="--client litellm".
test-clients:
	@scripts/setup test
	@scripts/test-clients $(CLIENTS)

# REVISION=6298a4ab names the older revision.
test-upgrade:
	@scripts/test-upgrade $(REVISION)

test-page:
	@scripts/setup page
	@scripts/test-page

# Runs all tests RUNS times, on a machine that is busy and stalls.
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

# Needs no internet; docs/gpus.md has the requirements.
bench-gpu:
	@scripts/bench-gpu $(BENCH)

# Options: BENCH="--gb 8".
bench-weights:
	@scripts/setup test
	@scripts/bench-weights $(BENCH)

# Options: BENCH="--case 2x128".
bench-moe:
	@scripts/setup moe
	@scripts/bench-moe $(BENCH)

bench-vllm:
	@scripts/setup test
	@scripts/bench-vllm $(BENCH)

# Runs all benchmarks in a smoke size, in a fresh copy of this tree.
figures:
	@scripts/setup test
	@$(VENV)/python -m verify.figures

# Skipped if the same engine has passed before; WHOLE=1 runs it in any case.
sanitize:
	@scripts/setup native
	@scripts/sanitize $(if $(WHOLE),--whole)

# SECONDS=600 is the time for each target. CI (.ci/run) has no time to reach every line.
fuzz:
	@scripts/setup fuzz
	@scripts/fuzz --seconds $(or $(SECONDS),30) --coverage

model:
	@scripts/setup test
	@$(VENV)/python -m verify.model

# Breaks workers and their network, then the control plane.
chaos:
	@scripts/setup verbs
	@PATH=$$PATH:/usr/sbin:/sbin $(VENV)/python -m verify.faults $(if $(ROUNDS),--rounds $(ROUNDS))
	@scripts/chaos-control

# Options: CHAOS="--redis cluster --continue-streams".
chaos-control:
	@scripts/setup test
	@scripts/chaos-control $(CHAOS)

chaos-vllm:
	@scripts/setup test
	@KVXFER_VLLM_PYTHON=$$(scripts/vllm-python) $(VENV)/python -m verify.faults.vllm

chaos-weights:
	@scripts/setup test
	@$(VENV)/python -m verify.faults.weights $(if $(ROUNDS),--rounds $(ROUNDS))

# Runs ROUNDS groups of two to eight processes.
chaos-moe:
	@scripts/setup test
	@$(VENV)/python -m verify.faults.moe $(if $(ROUNDS),--rounds $(ROUNDS))

# Sends a pair of vLLM three times the requests that it can serve, for MINUTES.
overload:
	@scripts/setup test
	@KVXFER_VLLM_PYTHON=$$(scripts/vllm-python) $(VENV)/python -m verify.faults.overload --minutes $(or $(MINUTES),5)

soak:
	@scripts/setup test
	@$(VENV)/python -m verify.faults.soak --minutes $(or $(MINUTES),5)

attack:
	@scripts/setup test
	@scripts/attack

# Simulates SEEDS fleets on virtual time. Options: SIMULATE="--json".
simulate:
	@scripts/setup test
	@$(VENV)/python -m verify.simulation --seeds $(or $(SEEDS),100000) $(SIMULATE)

# Simulates SEEDS MoE groups on virtual time.
simulate-moe:
	@scripts/setup test
	@$(VENV)/python -m verify.moe --seeds $(or $(SEEDS),20000)

# Applies patches with defects to the router. A test has to catch each.
router-defects:
	@scripts/setup test
	@$(VENV)/python -m verify.router_defects

helm-test:
	@scripts/setup test
	@scripts/helm-test

# Runs all long checks (hours). Steps that have passed on this tree are skipped.
verify:
	@scripts/setup ci
	@$(VENV)/python -m verify $(foreach step,$(STEP),--step $(step))

clean:
	rm -rf build dist .venv
